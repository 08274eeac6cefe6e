"""A program to watch: several requests at once in one context, recorded, until they are all served.

    python -m tests.kit.watched LOG [--requests 12] [--slots 4] [--tokens 60] [--pace 0.01]

Prints `recording` once the log exists, then waits for a line. Prints a hash of all logits at the
end. `--pace` is a pause after each step, in seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import llama_cpp.llama_cpp as api
import numpy as np

import llamacpp_instr
from llamacpp_instr.recording.session import Recording, Span
from tests.kit.native_kit import DEMO

CTX = 1024
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
    position: int = 0
    left: int = 0
    """tokens to sample"""
    mark: ExitStack = field(default_factory=ExitStack)
    span: Span | None = None


class Watched:
    """A model, and the slots of its context."""

    def __init__(self, n_slots: int) -> None:
        api.llama_backend_init()
        path = str(DEMO).encode()
        self.model = api.llama_model_load_from_file(path, api.llama_model_default_params())
        self.vocab = api.llama_model_get_vocab(self.model)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = CTX, 512, n_slots
        params.n_threads = params.n_threads_batch = 1
        params.kv_unified = True
        self.context = api.llama_init_from_model(self.model, params)
        self.batch = api.llama_batch_init(512, 0, 1)
        self.slots = [Slot(seq) for seq in range(n_slots)]
        self.hash = hashlib.sha256()

    def serve(self, session: Recording, requests: int, tokens: int, pace: float) -> None:
        """Serve that many requests of that many tokens."""
        sampler = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        api.llama_sampler_chain_add(sampler, api.llama_sampler_init_temp(0.8))
        api.llama_sampler_chain_add(sampler, api.llama_sampler_init_dist(7))
        begun = 0
        while begun < requests or any(slot.left for slot in self.slots):
            for slot in self.slots:
                if not slot.left and begun < requests:
                    self._begin(slot, session, begun, tokens)
                    begun += 1
            outputs = self._decode()
            for slot, output in outputs:
                token = api.llama_sampler_sample(sampler, self.context, output)
                slot.waiting = [token]
                slot.left -= 1
                if not slot.left:
                    assert slot.span is not None
                    slot.span.seq = slot.seq
                    slot.mark.close()
                    slot.waiting = []
            time.sleep(pace)

    def _begin(self, slot: Slot, session: Recording, number: int, tokens: int) -> None:
        api.llama_memory_seq_rm(api.llama_get_memory(self.context), slot.seq, -1, -1)
        slot.span = slot.mark.enter_context(session.mark(f"story {number}"))
        text = OPENINGS[number % len(OPENINGS)].encode()
        ids = (ctypes.c_int32 * 64)()
        n = api.llama_tokenize(self.vocab, text, len(text), ids, 64, True, False)
        slot.waiting, slot.position, slot.left = ids[:n], 0, tokens

    def _decode(self) -> list[tuple[Slot, int]]:
        batch, n, outputs = self.batch, 0, []
        for slot in self.slots:
            for token in slot.waiting:
                batch.token[n], batch.pos[n] = token, slot.position
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, slot.seq
                batch.logits[n] = False
                slot.position += 1
                n += 1
            if slot.waiting:
                batch.logits[n - 1] = True
                outputs.append((slot, n - 1))
        batch.n_tokens = n
        assert api.llama_decode(self.context, batch) == 0
        size = api.llama_vocab_n_tokens(self.vocab)
        for _, output in outputs:
            logits = api.llama_get_logits_ith(self.context, output)
            self.hash.update(np.ctypeslib.as_array(logits, (size,)).tobytes())
        return outputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("log")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--pace", type=float, default=0.01)
    asked = parser.parse_args()
    with llamacpp_instr.record(asked.log, force=True) as session:
        watched = Watched(asked.slots)
        print("recording", flush=True)
        sys.stdin.readline()
        watched.serve(session, asked.requests, asked.tokens, asked.pace)
    print(watched.hash.hexdigest())


if __name__ == "__main__":
    main()
