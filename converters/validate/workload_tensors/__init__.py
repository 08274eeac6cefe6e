"""The tensors of a run, as the inputs of workloads."""
