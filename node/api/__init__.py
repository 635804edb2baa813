"""What the node offers to other programs of its own machine, over HTTP on loopback."""
