"""Where two models with the same architecture part, and which of their weights cause it."""
