"""Stops a model between two ops of a compute: breakpoints, values, changes."""
