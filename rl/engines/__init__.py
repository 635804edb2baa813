"""Inference engines that turn prompts into rollouts, behind one protocol (`rl.engines.base`)."""
