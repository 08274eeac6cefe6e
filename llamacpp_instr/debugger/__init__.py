"""What `instr debug` stops at, reads and changes; the Debug Adapter Protocol; its page."""
