"""Quantization by llama.cpp's own quantizer: plan, checks, and the process that runs it."""
