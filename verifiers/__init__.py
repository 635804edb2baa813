"""Tasks with verifiable answers: made from a short reference, scored by code that cannot hurt the node."""
