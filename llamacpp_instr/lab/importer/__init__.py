"""Imports models of other formats with llama.cpp's own converter, which runs in a child process."""
