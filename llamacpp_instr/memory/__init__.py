"""Memory: what a context takes, predicted by a dry run or recorded."""
