"""`swarmnode testnet`: a swarm of real nodes on this machine, for a first look and for tests."""
