"""What `instr run`, `exec`, `debug` and `compare` start, record and put side by side."""
