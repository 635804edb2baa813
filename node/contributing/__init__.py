"""Answers of people, programs and other models to tasks: scored, grouped and shared like a node's own rollouts."""
