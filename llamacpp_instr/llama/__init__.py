"""The patched llama.cpp: building it, calling it, generating text, and what happens in a crash."""
