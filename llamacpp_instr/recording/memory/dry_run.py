"""Measures the memory of a model by llama.cpp's own dry run, without reading weights.

With `no_alloc` llama.cpp loads only a model's metadata, and a context measures its buffers instead
of allocating them. The result is exact to the byte except for two things, which this module
corrects:

- A dry run cannot map files. A real load maps the range of each file from the first to the last
  weight that is used in place. The range includes repacked weights, which also have a copy in a
  buffer of their own. The dry run shows which weights are used in place, and the files where they
  are.
- The compute buffer is that of a prompt's graph. A real context also has room for the graph of a
  single token, which differs in some architectures. So a second context, for one token at a time,
  is measured, and the larger buffer counts.

Invariant: no allocation is proportional to a file, a context or a batch, except 50 bytes per token
of a context, which llama.cpp keeps. An abort ends this process, so `memory.plan` runs these
functions in a child.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama import native
from llamacpp_instr.llama.engine import CACHE_TYPES, ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.interrupt import Interrupt
from llamacpp_instr.llama.log import LlamaLog, captured
from llamacpp_instr.log.schema import Context
from llamacpp_instr.log.schema import Memory as MemoryEvent
from llamacpp_instr.log.schema import Tensor as TensorEvent
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.recording.memory.breakdown import (
    PLAIN,
    ContextSettings,
    MemoryBreakdown,
    mapped_bytes,
    read_breakdown,
)
from llamacpp_instr.recording.pipe import LogPipe
from llamacpp_instr.recording.session import record

MAX_CTX = 1 << 25
"""tokens; beyond this the dry run's own bookkeeping would take gigabytes"""


def dry_run(model: ModelFile, options: ContextOptions, mmap: bool) -> MemoryBreakdown:
    """The memory of a context with the options of `instr run`; of one for embeddings if the model
    has no memory of its own.

    Raises `UsageError` for options that the model cannot run with, `LoadError` for a model that
    llama.cpp cannot load, `NativeError` without the patched library. Must not be called while a
    session is recorded.
    """
    options.check()
    check_size(options.ctx or 0)

    def make(dry: LoadedModel) -> None:
        with ModelContext(dry, options) as context:
            embed_tokens = 0 if context.memory else 1
        for ubatch in (1, options.ubatch):
            with ModelContext(dry, replace(options, ubatch=ubatch), embed_tokens):
                pass

    return _dry_run(model, make, mmap)


def dry_run_again(model: ModelFile, settings: ContextSettings) -> MemoryBreakdown:
    """The memory of a context with the settings of a recorded one. Raises like `dry_run`."""
    check_size(settings.n_ctx)

    def make(dry: LoadedModel) -> None:
        for n_ubatch in (settings.n_seq_max, settings.n_ubatch):
            with _RecordedContext(dry, replace(settings, n_ubatch=n_ubatch)):
                pass

    plan = _dry_run(model, make, settings.mmap)
    return replace(plan, settings=replace(plan.settings, swa_full=settings.swa_full))


def check_size(n_ctx: int) -> None:
    """Raise `UsageError` for a context that is too large for a dry run."""
    if n_ctx > MAX_CTX:
        raise UsageError(
            f"a context of {n_ctx:,} tokens; memory is predicted for up to {MAX_CTX:,}"
        )


class LoadError(UsageError):
    """llama.cpp cannot load the model."""


class _DryModel(LoadedModel):
    """A model's metadata, and empty buffers."""

    def __init__(self, path: Path, log: LlamaLog) -> None:
        try:
            # llama.cpp asserts that nothing is mapped
            super().__init__(path, log, mmap=False, no_alloc=True)
        except UsageError as error:
            raise LoadError(str(error)) from None


class _RecordedContext(ModelContext):
    """A context with the settings of a recorded one."""

    def __init__(self, model: LoadedModel, settings: ContextSettings) -> None:
        self._settings = settings
        options = ContextOptions(cache_type_k=settings.type_k, cache_type_v=settings.type_v)
        super().__init__(model, options)

    def _params(self, options: ContextOptions, embed_tokens: int) -> Any:  # noqa: ARG002
        of = self._settings
        params = self.api.llama_context_default_params()
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max"):
            setattr(params, name, getattr(of, name))
        for name in ("embeddings", "kv_unified", "swa_full"):
            setattr(params, name, getattr(of, name))
        params.type_k, params.type_v = CACHE_TYPES[of.type_k], CACHE_TYPES[of.type_v]
        params.flash_attn_type = int(of.flash_attn)
        return params


def _dry_run(model: ModelFile, make: Callable[[LoadedModel], None], mmap: bool) -> MemoryBreakdown:
    """The memory of the last context that `make` makes; the one before it is for single tokens."""
    with dry_context_log(model, "minimal") as (dry, content):
        make(dry)
    single, plan = _breakdowns(bytes(content))[-2:]
    plan = plan.with_room_for(single)
    if not mmap:
        return plan
    in_place = {placement.name for placement in plan.placements if placement.buffer == PLAIN}
    return plan.with_mapped_weights(mapped_bytes(model, in_place))


@contextmanager
def dry_context_log(
    model: ModelFile, level: Literal["minimal", "verbose"]
) -> Iterator[tuple[LoadedModel, bytearray]]:
    """The model without its weights, and the log of what is done with it, which is complete after
    the block. Must not be called while a session is recorded."""
    model.check_has_weights()
    native.load()
    # the recorder reports the buffer of every weight, as in any other log
    content = bytearray()
    with (
        LogPipe(content.extend) as log,
        captured(Interrupt()) as llama_log,
        record(log.path, level=level),
        _DryModel(model.path, llama_log) as dry,
    ):
        yield dry, content


def _breakdowns(log: bytes) -> list[MemoryBreakdown]:
    """The breakdown of each context in the log, in order."""
    # skips the model's events, because NaN is not valid JSON
    lines = [line for line in log.splitlines() if line.startswith(_NEEDED)]
    events = [_DECODER.decode(line) for line in lines]
    contexts = {event.ctx: event for event in events if isinstance(event, Context)}
    tensors = [event for event in events if isinstance(event, TensorEvent)]
    return [
        read_breakdown(contexts[event.ctx], event.buffers, tensors)
        for event in events
        if isinstance(event, MemoryEvent)
    ]


_NEEDED = tuple(f'{{"event":"{name}",'.encode() for name in ("tensor", "context", "memory"))
_DECODER = msgspec.json.Decoder(TensorEvent | Context | MemoryEvent)
