"""Work on model files: weights, quantization, quality, import from other formats."""
