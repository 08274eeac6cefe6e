"""The KV caches that are compared: their types, and the memory and the time of each.

Invariant: contexts take turns, so that other load on the machine affects all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.quality.divergence import CacheTypes, round_of
from llamacpp_instr.llama.engine import ContextOptions, ModelContext, is_quantized
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.recording.memory.plan import plan_memory

ROUNDS = 5
"""the fewest that show the noise of a time"""


def options_of(types: CacheTypes) -> ContextOptions:
    """The options of a context with such a cache."""
    return ContextOptions(cache_type_k=types.k, cache_type_v=types.v)


def parse_cache_types(k: str | None, v: str | None) -> list[CacheTypes]:
    """Every type of K with every type of V, as in llama-bench; both are lists with commas, or None
    for f16. The result is empty if both are None. Raises `UsageError` for an unknown type."""
    if k is None and v is None:
        return []
    found = [
        CacheTypes(*of)
        for of in product(*(("f16" if of is None else of).split(",") for of in (k, v)))
    ]
    for types in found:
        options_of(types).check()
    return list(dict.fromkeys(found))


def plan_caches(
    files: Sequence[ModelFile], caches: Sequence[CacheTypes], ctx: int | None
) -> list[int]:
    """The bytes of the cache of each of `files` at `ctx` tokens, by llama.cpp's own plan; the first
    is f16. Raises `UsageError` for a model without a KV cache, and like `plan_memory`."""
    found: list[int] = []
    for file, types in zip(files, caches, strict=True):
        found.append(plan_memory(file, replace(options_of(types), ctx=ctx)).of_kind("cache"))
        if any(map(is_quantized, types)) and found[-1] == found[0]:
            raise UsageError(f"{file.path} has no KV cache, so its types change nothing")
    return found


def time_in_turns(
    contexts: Sequence[ModelContext],
    chunk: Sequence[int],
    batch: int,
    on_tokens: Callable[[int], None],
) -> list[list[tuple[int, int]]]:
    """The rounds of each context, as in `CacheCost`, with the tokens of a chunk that it has
    computed. `on_tokens` gets the number of tokens newly computed."""
    depth, prompt, following = round_of(len(chunk))

    def pieces(begin: int, end: int, at_once: int) -> list[Sequence[int]]:
        return [chunk[i : min(i + at_once, end)] for i in range(begin, end, at_once)]

    rounds: list[list[tuple[int, int]]] = [[] for _ in contexts]
    for _ in range(ROUNDS):
        for context, own in zip(contexts, rounds, strict=True):
            if not context.keep(depth):
                context.clear()  # some memories cannot forget only the last tokens
                context.time_decodes(pieces(0, depth, batch))
            prefill = context.time_decodes(pieces(depth, depth + prompt, batch))
            decode = context.time_decodes(pieces(depth + prompt, len(chunk), 1))
            own.append((prefill, decode))
            on_tokens(prompt + following)
    return rounds
