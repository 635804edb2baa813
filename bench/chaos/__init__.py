"""A swarm of real nodes under random faults, and what must be true of it afterwards."""
