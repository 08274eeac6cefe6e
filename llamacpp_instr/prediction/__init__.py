"""The time of kernels that were not run, from what `instr probe` measured."""
