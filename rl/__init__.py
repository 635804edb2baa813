"""The learning side of a node: rollouts, the policy, and the round of SAPO (arXiv 2509.08721)."""
