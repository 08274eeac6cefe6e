"""Completions of llama-cpp-python, recorded, and what its caller got.

    python -m tests.kit.completions WHAT LOG

WHAT is a key of KINDS. Prints JSON: for each request the `usage` that llama-cpp-python counted, and
when it was `sent` and `done` by the caller's clock, in ns.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Any

import llamacpp_instr
from tests.kit.native_kit import DEMO

with suppress(ImportError):  # tests read KINDS also where `instr build` did not run
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

STORY, DOG = "Once upon a time", "A dog"
GIRL = "Once upon a time there was a girl who was a girl who was a girl who"
CAT = "A dog and a cat and a dog and a cat and a dog"

KINDS: dict[str, list[tuple[str, int]]] = {
    "again": [(STORY, 1), (STORY, 1), (STORY, 5), (STORY, 5), (DOG, 1), (DOG, 1)],
    "ended": [(STORY, 9)] * 4,
    "batches": [(f"{GIRL} {CAT} {GIRL}", 3), (f"{CAT} {GIRL} {CAT}", 3), (DOG, 2)],
    "logits": [(STORY, 1), (STORY, 1), (STORY, 5), (DOG, 1), (DOG, 1)],
    "drafts": [(GIRL, 40), (CAT, 40), ("", 5), (GIRL, 20)],
}
"""prompts and the maximum number of tokens of each. `again` and `logits` find whole prompts in the
cache, and `ended` samples an end token at once. `batches` has prompts of several batches. `drafts`
has a draft model and empties the cache each time."""


def main() -> None:
    what, log = sys.argv[1:]
    more: dict[str, Any] = {"logits_all": what == "logits"}
    if what == "drafts":
        more["draft_model"] = LlamaPromptLookupDecoding(num_pred_tokens=10)
    calls = []
    with llamacpp_instr.record(log, force=True):
        more["n_batch"] = 16 if what == "batches" else 256
        model = Llama(str(DEMO), n_ctx=256, n_threads=1, verbose=False, **more)
        wanted: dict[str, Any] = {"temperature": 0}
        if what == "ended":
            wanted["logit_bias"] = {str(model.token_eos()): 100.0}
        for prompt, n in KINDS[what]:
            if what == "drafts":
                model.reset()
            sent = time.monotonic_ns()
            done = model.create_completion(prompt, max_tokens=n, **wanted)
            calls.append({"usage": done["usage"], "sent": sent, "done": time.monotonic_ns()})
    print(json.dumps(calls))


if __name__ == "__main__":
    main()
