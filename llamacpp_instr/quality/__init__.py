"""What quantization costs in output: perplexity and KL divergence."""
