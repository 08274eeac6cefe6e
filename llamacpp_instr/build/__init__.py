"""Builds and installs the patched llama.cpp, and says what is missing."""
