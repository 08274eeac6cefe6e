"""A model of llama.cpp and a context with sequences that decode in one batch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

with suppress(ImportError):  # tests import this also where `instr build` did not run
    import llama_cpp.llama_cpp as api


class Decoder:
    """A model, a context, and the next position of each of its sequences."""

    def __init__(self, model: str, threads: int = 1, **params: Any) -> None:
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(
            model.encode(), api.llama_model_default_params()
        )
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.kv_unified = 512, 512, True
        options.n_threads = options.n_threads_batch = threads
        for name, value in params.items():
            setattr(options, name, value)
        self.n_batch = options.n_batch
        self.ctx = api.llama_init_from_model(self.model, options)
        self.sampler = api.llama_sampler_init_greedy()
        self.batch = api.llama_batch_init(512, 0, 1)
        self.pos = [0] * options.n_seq_max

    def decode(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Compute the next tokens of these sequences in one batch; returns the index of the output
        of each."""
        n, outputs = 0, {}
        for seq, added in tokens.items():
            for i, token in enumerate(added):
                self.batch.token[n], self.batch.pos[n] = token, self.pos[seq]
                self.batch.n_seq_id[n], self.batch.seq_id[n][0] = 1, seq
                self.batch.logits[n] = i == len(added) - 1
                self.pos[seq] += 1
                n += 1
            outputs[seq] = n - 1
        self.batch.n_tokens = n
        assert api.llama_decode(self.ctx, self.batch) == 0
        return outputs

    def sample(self, output: int = -1) -> int:
        token: int = api.llama_sampler_sample(self.sampler, self.ctx, output)
        return token

    def generate(self, n_prompt: int = 64, n: int = 60, pause: float = 0) -> None:
        """A prompt, then `n` tokens, with `pause` seconds of the application after each."""
        prompt = [1 + i % 300 for i in range(n_prompt)]
        for first in range(0, n_prompt, self.n_batch):
            self.decode({0: prompt[first : first + self.n_batch]})
        for _ in range(n):
            token = self.sample()
            if pause:
                time.sleep(pause)
            self.decode({0: [token]})

    def forget(self) -> None:
        """Empty the cache."""
        api.llama_memory_clear(api.llama_get_memory(self.ctx), False)
        self.pos = [0] * len(self.pos)

    def cut(self, seq: int, length: int = 0) -> None:
        """Leave only the first tokens of a sequence in the cache."""
        api.llama_memory_seq_rm(api.llama_get_memory(self.ctx), seq, length, -1)
        self.pos[seq] = length
