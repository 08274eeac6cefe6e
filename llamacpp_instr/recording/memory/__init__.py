"""The memory of a context: predicted by a dry run, or recorded."""
