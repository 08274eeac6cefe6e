"""Chooses tokens: greedily, or with llama.cpp's own sampler chain and a known seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama.engine import ModelContext


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. At temperature 0, always the most probable one."""

    temp: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None

    def check(self) -> None:
        """Raise `UsageError` for a value that is out of range or would have no effect."""
        if not 0 <= self.temp <= 100:
            raise UsageError(f"--temp is {self.temp}; it must be from 0 (greedy) to 100")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k is {self.top_k}; it must be at least 1")
        for name, value in (("top-p", self.top_p), ("min-p", self.min_p)):
            if value is not None and not 0 <= value <= 1:
                raise UsageError(f"--{name} is {value}; it must be from 0 to 1")
        if self.seed is not None and not 0 <= self.seed < 2**32 - 1:
            raise UsageError(f"--seed is {self.seed}; it must be from 0 to {2**32 - 2}")
        for name in ("top_k", "top_p", "min_p"):
            if self.temp == 0 and getattr(self, name) is not None:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} has no effect on greedy sampling; add --temp")

    def with_seed(self) -> Sampling:
        """A copy with a seed, so that the run can be repeated."""
        if self.temp == 0 or self.seed is not None:
            return self
        seed = random.SystemRandom().randrange(2**32 - 1)
        return Sampling(self.temp, self.top_k, self.top_p, self.min_p, seed)


class Sampler:
    """A sampler chain of llama.cpp for one context."""

    def __init__(self, context: ModelContext, sampling: Sampling) -> None:
        sampling.check()
        self.api = context.api
        self.context = context
        self.handle: int | None = self.api.llama_sampler_chain_init(
            self.api.llama_sampler_chain_default_params()
        )
        for link in self._links(sampling.with_seed()):
            self.api.llama_sampler_chain_add(self.handle, link)

    def sample(self, token: int = -1) -> int:
        """Choose a token from the logits that were computed last, or from those of batch position
        `token` if several positions have logits."""
        return int(self.api.llama_sampler_sample(self.handle, self.context.handle, token))

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        if self.handle:
            self.api.llama_sampler_free(self.handle)
            self.handle = None

    def _links(self, sampling: Sampling) -> list[int]:
        api = self.api
        if sampling.temp == 0:
            return [api.llama_sampler_init_greedy()]
        # llama.cpp's own order: first remove unlikely tokens, then apply the temperature
        links = []
        if sampling.top_k is not None:
            links.append(api.llama_sampler_init_top_k(sampling.top_k))
        if sampling.top_p is not None:
            links.append(api.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p is not None:
            links.append(api.llama_sampler_init_min_p(sampling.min_p, 1))
        links.append(api.llama_sampler_init_temp(sampling.temp))
        links.append(api.llama_sampler_init_dist(sampling.seed))
        return links
