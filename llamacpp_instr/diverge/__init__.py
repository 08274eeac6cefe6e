"""Two models side by side, node by node, and mixtures of their weights."""
