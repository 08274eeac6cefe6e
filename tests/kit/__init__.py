"""Shared code of the tests: models, logs, recordings, libraries to compare with."""
