"""What a node of a graph is, how to describe it, and when it ran."""
