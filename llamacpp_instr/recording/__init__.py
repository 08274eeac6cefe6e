"""Sessions of this process, the files that they leave, and the memory of a context."""
