"""What `instr run`, `instr exec` and `instr compare --types` start and record."""
