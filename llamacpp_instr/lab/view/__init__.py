"""The page of `instr weights --view`: any tensor as a picture, from the whole to single weights."""
