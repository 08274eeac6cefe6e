"""What `instr run`, `exec` and `compare --types` start and record."""
