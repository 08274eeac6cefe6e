"""What `instr probe` measures, and the time of kernels that were not run."""
