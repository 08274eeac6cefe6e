"""`instr validate --reference`: the states of every layer beside those of transformers."""
