"""What the machine can do: bandwidth of its memory, ggml's own kernels, the cost of a barrier."""
