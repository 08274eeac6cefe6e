"""`instr validate --against`: the states of every layer beside those of transformers."""
