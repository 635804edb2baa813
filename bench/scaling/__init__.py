"""A swarm of up to 100,000 nodes as a discrete-event simulation: topics, meshes, links, churn, what a node can use."""
