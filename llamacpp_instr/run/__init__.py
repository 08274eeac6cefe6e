"""What `instr run`, `exec`, `debug`, `compare` and `memory` start, record and put side by side."""
