"""The page of `instr weights --view`: any tensor as a picture, from the whole to single weights.

`tensors` answers what the page asks, with tiles (`tiles`) that are computed on request and kept in
a bounded cache. `server` has routes that another page's server can mount, too.
"""
