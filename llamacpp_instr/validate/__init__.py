"""Checks the ops of a model: an independent implementation computes each from the same inputs."""
