"""Programs with a make target of their own."""
