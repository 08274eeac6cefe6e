"""What a node of a graph is, in which words people speak of it, and when it ran."""
