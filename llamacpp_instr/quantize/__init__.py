"""Quantization by llama.cpp's own quantizer: plan, checks, the process that does it."""
