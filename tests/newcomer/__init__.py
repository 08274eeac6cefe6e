"""The pages' commands in a fresh clone, as a newcomer runs them: `make test-docs`."""
