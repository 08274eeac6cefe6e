"""Predicts the memory and the graphs of a model by llama.cpp's own dry run, in a child process.

llama.cpp trusts much of a file's metadata, and ends the process on some wrong values. In a child
this becomes a one-line error. The child also keeps a prediction apart from a session that this
process records.

With `no_alloc` llama.cpp loads only a model's metadata, and a context measures its buffers instead
of allocating them. The result is exact to the byte except for two things, which this module
corrects:

- A dry run cannot map files. A real load maps the range of each file from the first to the last
  weight that is used in place, which includes repacked weights. The dry run shows which weights are
  used in place, and the files show where they are.
- The compute buffer is that of a prompt's graph. A real context also has room for the graph of a
  single token, which differs in some architectures. So a second context, for one token at a time,
  is measured, and the larger buffer counts.

Invariant: no allocation is proportional to a file, a context or a batch, except 50 bytes per token
of a context, which llama.cpp keeps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.machine import machine_memory
from llamacpp_instr.base.terminal import progress_bar
from llamacpp_instr.llama import native
from llamacpp_instr.llama.crashes import ChildEnded, Result, call_in_child
from llamacpp_instr.llama.devices import ANYWHERE, Placement, devices
from llamacpp_instr.llama.engine import CACHE_TYPES, ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.log import Interrupt, LlamaLog, captured
from llamacpp_instr.log import schema
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.model.types import NOT_COMPUTED
from llamacpp_instr.recording.memory.breakdown import (
    MAPPED,
    ContextSettings,
    MemoryBreakdown,
    is_plain,
    mapped_bytes,
    read_breakdown,
)
from llamacpp_instr.recording.session import LogPipe, record

E = TypeVar("E", bound=schema.Event)

MAX_CTX = 1 << 25
"""tokens; beyond this the dry run's own bookkeeping would take gigabytes"""


def dry_run(
    model: ModelFile, options: ContextOptions, mmap: bool, placement: Placement = ANYWHERE
) -> MemoryBreakdown:
    """`plan_memory` in this process, which must not record a session."""
    options.check()
    check_size(options.ctx or 0)

    def make(dry: LoadedModel) -> None:
        with ModelContext(dry, options) as context:
            embed_tokens = 0 if context.memory else 1
        for ubatch in (1, options.ubatch):
            with ModelContext(dry, replace(options, ubatch=ubatch), embed_tokens):
                pass

    return _dry_run(model, make, mmap, placement)


def dry_run_again(
    model: ModelFile, settings: ContextSettings, placement: Placement = ANYWHERE
) -> MemoryBreakdown:
    """The memory of a context with the settings of a recorded one, in this process."""
    placement.check()
    check_size(settings.n_ctx)

    def make(dry: LoadedModel) -> None:
        for n_ubatch in (settings.n_seq_max, settings.n_ubatch):
            with _RecordedContext(dry, replace(settings, n_ubatch=n_ubatch)):
                pass

    plan = _dry_run(model, make, settings.mmap, placement)
    return replace(plan, settings=replace(plan.settings, swa_full=settings.swa_full))


def check_size(n_ctx: int) -> None:
    """Raise `UsageError` for a context that is too large for a dry run."""
    if n_ctx > MAX_CTX:
        raise UsageError(
            f"a context of {n_ctx:,} tokens; memory is predicted for up to {MAX_CTX:,}"
        )


class LoadError(UsageError):
    """llama.cpp cannot load the model."""


def _dry_model(path: Path, log: LlamaLog, placement: Placement) -> LoadedModel:
    """A model's metadata, and empty buffers."""
    try:
        # llama.cpp asserts that nothing is mapped
        return LoadedModel(path, log, mmap=False, placement=placement, no_alloc=True)
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


def _dry_run(
    model: ModelFile,
    make: Callable[[LoadedModel], None],
    mmap: bool,
    placement: Placement = ANYWHERE,
) -> MemoryBreakdown:
    """The memory of the last context that `make` makes; the previous one is for single tokens."""
    with dry_context_log(model, placement) as (dry, content):
        make(dry)
    single, plan = _breakdowns(bytes(content))[-2:]
    plan = plan.with_room_for(single)
    if placement.rpc:  # the recorder sends nothing to a server
        remote = [of for of in devices() if of.backend == "RPC"]
        there = [schema.DeviceMemory(device=of.name, total=of.memory_bytes, free=of.free_bytes)
                 for of in remote]  # fmt: skip
        plan = replace(plan, devices=[*plan.devices, *there])
    if not mmap:
        return plan
    in_place = {placement.name for placement in plan.placements if is_plain(placement.buffer)}
    return plan.with_mapped_weights(mapped_bytes(model, in_place))


@contextmanager
def dry_context_log(
    model: ModelFile, placement: Placement = ANYWHERE
) -> Iterator[tuple[LoadedModel, bytearray]]:
    """The model without its weights, and the log of its use, complete after the block."""
    model.check_has_weights()
    native.load()
    # without a model's weights, the recorder reports the buffers of tensors only at verbose
    content = bytearray()
    with (
        LogPipe(content.extend) as log,
        captured(Interrupt()) as llama_log,
        record(log.path, level="verbose"),
        _dry_model(model.path, llama_log, placement) as dry,
    ):
        yield dry, content


def _breakdowns(log: bytes) -> list[MemoryBreakdown]:
    """The breakdown of each context in the log, in order."""
    contexts = {event.ctx: event for event in _events(log, schema.Context)}
    tensors = _events(log, schema.Tensor)
    memory = _events(log, schema.Memory)
    return [
        read_breakdown(contexts[event.ctx], event.buffers, tensors, event.devices)
        for event in memory
    ]


def _events(log: bytes, kind: type[E]) -> list[E]:
    # skips the model's events, because NaN is not valid JSON
    begin = f'{{"event":"{schema.event_name(kind)}",'.encode()
    lines = [line for line in log.splitlines() if line.startswith(begin)]
    return [msgspec.json.decode(line, type=kind) for line in lines]


WINDOW = 256
"""the window of a cache is a multiple of this many cells: llama_kv_cache::get_n_kv"""


@dataclass(frozen=True)
class UbatchShape:
    """Consecutive tokens of one sequence."""

    tokens: int
    past: int = 0
    """tokens of the sequence that are in the cache"""
    outputs: int = 1
    """tokens whose logits are wanted"""


def dry_graphs(
    model: ModelFile, options: ContextOptions, ubatches: Sequence[UbatchShape]
) -> list[schema.Graph]:
    """The graph of each ubatch, in a context with the options of `instr run`, whose size follows
    from the ubatch: `options.ctx` does not count.

    It equals the graph of a real ubatch after `past` tokens, except for three things. The buffers
    of weights that a real load maps are `CPU`, not `CPU_Mapped`, and computed tensors have no
    buffer. A recurrent model's graph also clears its state, as before a first token. The window of
    the cache has the same number of cells, because the context is made as large as that window.
    Raises like `plan_memory`.
    """
    return in_a_child(_dry_graphs, model, options, ubatches)


def window(ubatch: UbatchShape) -> int:
    """How many cells of the cache llama.cpp gives to the graph of this ubatch."""
    return -(-(ubatch.past + ubatch.tokens) // WINDOW) * WINDOW


def _dry_graphs(
    model: ModelFile, options: ContextOptions, ubatches: Sequence[UbatchShape]
) -> list[schema.Graph]:
    options.check()
    for ubatch in ubatches:
        if ubatch.tokens < 1 or ubatch.past < 0 or not 1 <= ubatch.outputs <= ubatch.tokens:
            raise UsageError(f"{ubatch} is not a ubatch")
        check_size(window(ubatch))
    library = native.load()
    with dry_context_log(model) as (dry, content):
        for ubatch in ubatches:
            sized = replace(
                options,
                ctx=window(ubatch),
                batch=max(options.batch or 0, ubatch.tokens),
                ubatch=max(options.ubatch or 0, ubatch.tokens),
            )
            with ModelContext(dry, sized) as context:
                embeds = 0 if context.memory else ubatch.tokens
                if not embeds:
                    _reserve(library, context, ubatch)
            if embeds:  # such a model sees one ubatch only
                with ModelContext(dry, sized, embeds) as context:
                    _reserve(library, context, replace(ubatch, outputs=ubatch.tokens))
    return _events(bytes(content), schema.Graph)


def _reserve(library: native.Native, context: ModelContext, ubatch: UbatchShape) -> None:
    assert context.handle is not None
    library.reserve_graph(context.handle, ubatch.tokens, 1, ubatch.outputs)


MAX_BYTES = 2 << 30
"""limit of the child's memory for a dry run"""

_INDICES = {"ffn_gate_tid2eid"}
"""roles of weights whose rows are looked up, not multiplied"""


def check_memory(
    model: ModelFile,
    options: ContextOptions,
    mmap: bool = True,
    placement: Placement = ANYWHERE,
) -> list[str]:
    """Raise `UsageError` for a model that must not be loaded into this process, because llama.cpp
    fails or ends the process on it, or because its context does not fit into this machine's memory.
    Returns a warning for each device that lacks memory: a driver may have more than it reports.

    A few numbers in a small file can make llama.cpp allocate any amount of memory. Raises
    `NativeError` without the patched library.
    """
    for weight in model.weights:
        if weight.type.name in NOT_COMPUTED and weight.role not in _INDICES:
            raise UsageError(
                f"{model.path}: tensor {weight.name!r} is {weight.type}, with which llama.cpp "
                "cannot compute; convert the model to another type"
            )
    plan = plan_memory(model, options, mmap, placement)
    # a mapped file may be larger than memory, and other devices have their own memory
    allocated = [
        use for use in plan.uses if schema.is_of_machine(use.buffer) and use.buffer != MAPPED
    ]
    needed, there = sum(use.n_bytes for use in allocated), machine_memory()
    if there is not None and needed > there:
        parts = ", ".join(
            f"{kind} {_gb(n_bytes)}"
            for kind in ("weights", "cache", "compute")
            if (n_bytes := sum(use.n_bytes for use in allocated if use.kind == kind))
        )
        raise UsageError(
            f"{model.path} needs {_gb(needed)} of memory ({parts}), this machine has {_gb(there)}; "
            "a smaller context needs less"
        )
    if not plan.too_large():
        return []
    layers = most_layers(model, options, mmap, placement)
    return [
        f"warning: {model.path} needs {_gb(needed)} on {device.device}, which has"
        f" {_gb(device.free)} free; --gpu-layers {layers} needs less"
        for device, needed in plan.too_large()
    ]


def most_layers(model: ModelFile, options: ContextOptions, mmap: bool, placement: Placement) -> int:
    """For --gpu-layers: the most layers, counting the output as one more, that fit on the devices.
    Raises like `plan_memory`."""
    layers = len({weight.layer for weight in model.weights} - {-1})
    most = range(1, 1 + (layers + 1 if placement.gpu_layers is None else placement.gpu_layers))
    tries = count(1)
    with progress_bar("Planning for fewer layers") as on_progress:

        def too_many(n: int) -> bool:
            fewer = replace(placement, gpu_layers=n)
            found = plan_memory(model, options, mmap, fewer).too_large()
            on_progress(next(tries), most.stop.bit_length())
            return bool(found)

        return bisect_left(most, True, key=too_many)


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.1f} GB"


def plan_memory(
    model: ModelFile,
    options: ContextOptions,
    mmap: bool = True,
    placement: Placement = ANYWHERE,
) -> MemoryBreakdown:
    """The memory of a context with the options of `instr run`; of a context for embeddings if the
    model has no cache or state.

    Raises `UsageError` for options that the model cannot run with, `LoadError` for a model that
    llama.cpp cannot load, `NativeError` without the patched library.
    """
    return in_a_child(dry_run, model, options, mmap, placement)


def plan_memory_again(model: ModelFile, measured: MemoryBreakdown) -> MemoryBreakdown:
    """The memory of a context with the settings of a recorded one, and as many layers on its
    devices. Raises like `plan_memory`, and `UsageError` if this process lacks a device.

    No event records whether the cache of a model with sliding windows has the whole context. This
    assumes that it does only if the cache would then be as large as the measured one.
    """
    placed = Placement(device=["none"])
    if {use.device for use in measured.uses} - {of.device for of in measured.devices} - {""}:
        raise UsageError("parts of the model were on RPC servers")
    if measured.devices:
        placed = Placement(measured.gpu_layers, [of.device for of in measured.devices])
    plan = in_a_child(dry_run_again, model, measured.settings, placed)
    if plan.of_kind("cache") != measured.of_kind("cache"):
        settings = replace(measured.settings, swa_full=True)
        whole = in_a_child(dry_run_again, model, settings, placed)
        if whole.of_kind("cache") == measured.of_kind("cache"):
            return whole
    return plan


def in_a_child(function: Callable[..., Result], model: ModelFile, *arguments: object) -> Result:
    """What `function` returns or raises for these arguments; `LoadError` if it ends its process."""
    try:
        return call_in_child(MAX_BYTES, function, model, *arguments)
    except ChildEnded as end:
        raise LoadError(f"{model.path}: llama.cpp ended the process: {end}") from None
