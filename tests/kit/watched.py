"""A program to watch: several requests at once in one context, recorded, until they are all served.

    python -m tests.kit.watched LOG [--requests 12] [--pace 0.01]

Prints `recording` once the log exists, then waits for a line. Prints a hash of all logits at the
end. `--pace` is a pause after each step, in seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import llama_cpp.llama_cpp as api
import numpy as np

import llamacpp_instr
from llamacpp_instr.recording.session import Recording, Span
from tests.kit.decoder import Decoder
from tests.kit.native_kit import DEMO

SLOTS = 4
TOKENS = 60
"""of each request"""
OPENINGS = (
    "Once upon a time, there was", "There once was a girl named Nora who", "Long ago, an old owl",
    "One day, a small boat came to the lake. Tom and his friend Pip",
)  # fmt: skip


@dataclass
class Slot:
    """A sequence, and the request that it serves."""

    seq: int
    waiting: list[int] = field(default_factory=list)
    """tokens that are not computed"""
    left: int = 0
    """tokens to sample"""
    mark: ExitStack = field(default_factory=ExitStack)
    span: Span | None = None


class Watched(Decoder):
    """A model, and the slots of its context."""

    def __init__(self) -> None:
        super().__init__(str(DEMO), n_ctx=1024, n_seq_max=SLOTS)
        self.vocab = api.llama_model_get_vocab(self.model)
        self.sampler = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        api.llama_sampler_chain_add(self.sampler, api.llama_sampler_init_temp(0.8))
        api.llama_sampler_chain_add(self.sampler, api.llama_sampler_init_dist(7))
        self.slots = [Slot(seq) for seq in range(SLOTS)]
        self.hash = hashlib.sha256()

    def serve(self, session: Recording, requests: int, pace: float) -> None:
        """Serve that many requests."""
        started = 0
        while started < requests or any(slot.left for slot in self.slots):
            for slot in self.slots:
                if not slot.left and started < requests:
                    self._begin(slot, session, started)
                    started += 1
            outputs = self.decode({slot.seq: slot.waiting for slot in self.slots if slot.left})
            self._add_logits(outputs.values())
            for seq, output in outputs.items():
                slot = self.slots[seq]
                slot.waiting = [self.sample(output)]
                slot.left -= 1
                if not slot.left:
                    assert slot.span is not None
                    slot.span.seq = slot.seq
                    slot.mark.close()
            time.sleep(pace)

    def _begin(self, slot: Slot, session: Recording, number: int) -> None:
        self.cut(slot.seq)
        slot.span = slot.mark.enter_context(session.mark(f"story {number}"))
        text = OPENINGS[number % len(OPENINGS)].encode()
        ids = (ctypes.c_int32 * 64)()
        n = api.llama_tokenize(self.vocab, text, len(text), ids, 64, True, False)
        slot.waiting, slot.left = ids[:n], TOKENS

    def _add_logits(self, outputs: Iterable[int]) -> None:
        """Add the logits of a decode to the hash."""
        size = api.llama_vocab_n_tokens(self.vocab)
        for output in outputs:
            logits = api.llama_get_logits_ith(self.ctx, output)
            self.hash.update(np.ctypeslib.as_array(logits, (size,)).tobytes())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("log")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--pace", type=float, default=0.01)
    asked = parser.parse_args()
    with llamacpp_instr.record(asked.log, force=True) as session:
        watched = Watched()
        print("recording", flush=True)
        sys.stdin.readline()
        watched.serve(session, asked.requests, asked.pace)
    print(watched.hash.hexdigest())


if __name__ == "__main__":
    main()
