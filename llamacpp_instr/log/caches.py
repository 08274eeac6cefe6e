"""Which cells the tokens of a compute find in the caches of their context.

A log tells how many cells a ubatch leaves in use, and its first position. Once a cache was empty,
that says where each position is, as long as one sequence is in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamacpp_instr.graph.attention import Seen, Span, Ubatch
from llamacpp_instr.schema import Compute, Context, Kv, Model, StepBegin


@dataclass
class _Cache:
    used: int = 0
    next: int | None = None
    """the position that follows, if one sequence has all positions before it; None if unknown"""
    in_order: bool = False
    """position i is in cell i"""
    applied: Kv | None = None
    """cells a ubatch were taken, its compute has not come yet"""


class Caches:
    """Follows the caches of one context. A cache is unknown until it is seen empty."""

    def __init__(self, context: Context, model: Model) -> None:
        self._context = context
        window = model.hparams.get("n_swa")
        self._window = window if isinstance(window, int) and window > 0 else 0
        # LLAMA_SWA_TYPE_CHUNKED and _SYMMETRIC: src/models/*.cpp
        self._uniform = model.arch not in ("llama4", "gemma-embedding", "modern-bert")
        self._caches: dict[int, _Cache] = {}
        self._step = -1
        self._computed = 0
        """tokens of the step in computes before"""

    def take(self, kv: Kv) -> None:
        """Follows a change of a cache."""
        if kv.kind != "kv":
            return
        cache = self._caches.setdefault(kv.cache, _Cache())
        if kv.op == "apply":
            cache.applied = kv
            return
        removes = kv.op in ("seq_rm", "seq_keep", "clear")
        if cache.applied or not (removes and kv.used == cache.used):
            tail = kv.op == "seq_rm" and kv.p0 is not None and (kv.p1 is None or kv.p1 < 0)
            if removes and not kv.used:
                cache.next, cache.in_order = 0, True
            elif tail and cache.in_order and kv.used == kv.p0 and not cache.applied:
                cache.next = kv.p0
            else:
                cache.next, cache.in_order = None, False
        cache.used, cache.applied = kv.used, None

    def compute(self, compute: Compute, step: StepBegin | None) -> Ubatch:
        """What is known of the masks of a compute; `step` is the one that it belongs to."""
        if step is None or step.step != self._step:
            self._step, self._computed = -1 if step is None else step.step, 0
        n, first = compute.n_tokens, None
        if step is not None and step.n_seqs == 1:
            first = step.pos + self._computed if step.pos >= 0 else -1
        self._computed += n
        seen = [self._seen(cache, n, first) for _, cache in sorted(self._caches.items())]
        return Ubatch(
            n_threads=compute.n_threads,
            n_tokens=n,
            alone=(Span(0, n),) if step is not None and step.n_seqs == 1 else (),
            caches=tuple(of for of in seen if of is not None),
            causal=self._context.causal,
            window=self._window,
            uniform=self._uniform,
        )

    def _seen(self, cache: _Cache, n: int, first: int | None) -> Seen | None:
        """What `n` tokens from position `first` on find; -1 if llama.cpp chose it, None if they are
        of several sequences."""
        kv, cache.applied = cache.applied, None
        if kv is None:
            return None
        before, cache.used = cache.used, kv.used
        empty = kv.used == n
        if first == -1:
            first = 0 if empty else cache.next
        if first is not None and empty and first == 0:
            cache.next, cache.in_order = n, True
        elif first is not None and cache.next == first and 0 <= kv.used - before <= n:
            cache.next = first + n
            # else cells behind the window were taken again
            cache.in_order = cache.in_order and kv.used - before == n
        else:
            cache.next, cache.in_order = None, False
        if kv.cells is not None and kv.cells != list(range(kv.used - n, kv.used)):
            cache.in_order = False
        if cache.next is not None:
            span = Span(cache.next - n, n)
        elif self._context.n_seq_max == 1 and first is not None and kv.used >= n:
            # cells were removed or moved, but all that are left come before these tokens
            span = Span(kv.used - n, n)
        else:
            return Seen(kv.used, size=kv.size)
        return Seen(kv.used, (span,), cache.next is not None, cache.in_order, kv.size)
