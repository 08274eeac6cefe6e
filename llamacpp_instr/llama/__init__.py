"""The patched llama.cpp: how it is built, bound, asked for text, and how it crashes."""
