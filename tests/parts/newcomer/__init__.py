"""The pages' commands in a fresh clone, as a new user runs them: `make test-all PARTS=newcomer`."""
