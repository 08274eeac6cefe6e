"""Builds and installs the patched llama.cpp, and diagnoses an installation."""
