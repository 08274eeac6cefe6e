"""What `instr run`, `exec`, `bench`, `debug`, `compare` and `memory` start, record and compare."""
