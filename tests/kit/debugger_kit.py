"""Runs a model on a prompt, with a debugger that follows or stops it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from llamacpp_instr.debugger.graph import LiveGraph
from llamacpp_instr.debugger.stop import Debugging, Follower, Go, Stop, debug
from llamacpp_instr.llama.engine import ComputeError, ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.log import captured


@dataclass
class Run:
    """What a model computed."""

    logits: list[np.ndarray] = field(default_factory=list)
    """of the prompt's last token, then of each decode"""
    tokens: list[int] = field(default_factory=list)
    """the most probable token after each"""
    graph: LiveGraph | None = None
    """of the last compute, if it was debugged; its tensors are gone"""

    def same_bits(self, other: Run) -> bool:
        return len(self.logits) == len(other.logits) and all(
            np.array_equal(a.view(np.int32), b.view(np.int32))
            for a, b in zip(self.logits, other.logits, strict=True)
        )


@contextmanager
def opened(path: Path) -> Iterator[LoadedModel]:
    """A model as `instr run` opens it; its own messages are not shown."""
    with captured() as log, LoadedModel(path, log) as model:
        yield model


def prompt_of(model: LoadedModel, n: int = 20, first: int = 3) -> list[int]:
    """Some tokens of the vocabulary."""
    return [(7 * i + first) % model.n_vocab for i in range(n)]


def run(
    model: LoadedModel,
    log: Path | None = None,
    *,
    followers: Sequence[Follower] | Callable[[Debugging], Sequence[Follower]] = (),
    breakpoints: Sequence[str] = (),
    on_stop: Callable[[Stop], Go | None] = lambda _stop: None,
    prompt: Sequence[int] | None = None,
    decodes: int = 2,
    all_logits: bool = False,
    threads: int = 1,
    flash_attn: str = "auto",
    cache_type_k: str = "f16",
    ubatch: int | None = None,
) -> Run:
    """Compute a prompt and `decodes` more tokens. With a `log` the session is debugged."""
    options = ContextOptions(
        ctx=256, threads=threads, flash_attn=flash_attn, cache_type_k=cache_type_k, ubatch=ubatch
    )
    tokens = list(prompt or prompt_of(model))
    done = Run()
    with (
        debug(log, force=True) if log else nullcontext() as debugging,
        ModelContext(model, options) as context,
    ):
        if debugging is not None:
            debugging.on_stop = on_stop
            debugging.debugger.followers += (
                followers(debugging) if callable(followers) else followers
            )
            for text in breakpoints:
                debugging.add(text)
        try:
            if model.has_encoder:
                context.encode(tokens)
                tokens = [model.start_token]
            for step in range(decodes + 1):
                context.decode(tokens, all_logits and step == 0)
                done.logits.append(last_logits(context))
                done.tokens.append(int(np.nan_to_num(done.logits[-1]).argmax()))
                tokens = done.tokens[-1:]
        except ComputeError:
            if debugging is None or debugging.debugger.error is None:
                raise  # otherwise what ended the compute is raised at the end of the block
        if debugging is not None:
            done.graph = debugging.debugger.graph
    return done


def last_logits(context: ModelContext) -> np.ndarray:
    api: Any = context.api
    row = api.llama_get_logits_ith(context.handle, -1)
    return np.ctypeslib.as_array(row, (context.model.n_vocab,)).copy()


def without(model: Path, names: Sequence[str], to: Path) -> Path:
    """A copy of a model file in which the data of these tensors is zero bytes: zeros, in all types
    of floats and blocks."""
    shutil.copyfile(model, to)
    data = np.memmap(to, np.uint8, "r+")
    reader = gguf.GGUFReader(to)
    found = [tensor for tensor in reader.tensors if tensor.name in names]
    assert len(found) == len(names)
    for tensor in found:
        data[tensor.data_offset : tensor.data_offset + tensor.n_bytes] = 0
    data.flush()
    return to
