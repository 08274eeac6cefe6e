"""Weights: blocks and their layout, numbers, statistics, errors."""
