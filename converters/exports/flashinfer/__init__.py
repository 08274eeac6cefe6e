"""Sessions as workloads of flashinfer-bench."""
