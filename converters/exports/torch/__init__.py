"""A log for PyTorch's tools: a trace of its profiler, and scalars for TensorBoard."""
