"""The swarm: how nodes find each other, what they send, and what they believe of it."""
