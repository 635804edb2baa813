"""Real nodes that only pass batches on: what `bench.gossip` measures."""
