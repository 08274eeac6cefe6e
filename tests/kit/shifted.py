"""A text whose context was shifted, recorded: python -m tests.kit.shifted LOG. Its prompt, then one
token at a time; when the context is full, half of what is behind its first cells is taken away."""

from __future__ import annotations

import sys
from contextlib import suppress

import llamacpp_instr
from tests.kit.native_kit import DEMO

with suppress(ImportError):  # tests read SHIFTS also where `instr build` did not run
    from llama_cpp import Llama

PROMPT, CELLS, KEPT, SHIFTS = 40, 64, 4, 3


def main() -> None:
    with llamacpp_instr.record(sys.argv[1], force=True):
        model = Llama(str(DEMO), n_ctx=CELLS, n_threads=1, verbose=False)
        tokens = (model.tokenize(b"Once upon a time there was a girl. " * 9))[:PROMPT]
        shifts = 0
        while shifts < SHIFTS or model.n_tokens < CELLS:
            if model.n_tokens + len(tokens) > CELLS:
                gone, shifts = (CELLS - KEPT) // 2, shifts + 1
                model._ctx.kv_cache_seq_rm(0, KEPT, KEPT + gone)
                model._ctx.kv_cache_seq_shift(0, KEPT + gone, -1, -gone)
                model.n_tokens -= gone
            model.eval(tokens)
            tokens = [model.sample(temp=0.0)]


if __name__ == "__main__":
    main()
