"""The effect of quantization on a model's output: perplexity and KL divergence."""
