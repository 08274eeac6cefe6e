"""The patched llama.cpp: from its C functions to generated text."""
