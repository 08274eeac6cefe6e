"""Predicts the memory of a model, in a child process.

llama.cpp trusts much of a file's metadata, and ends the process on some wrong values. In a child
this becomes a one-line error. The child also keeps a prediction apart from a session that this
process records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama.child import ChildEnded, Result, call_in_child
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.model.types import NOT_COMPUTED
from llamacpp_instr.recording.memory.breakdown import MAPPED, MemoryBreakdown
from llamacpp_instr.recording.memory.dry_run import LoadError, dry_run, dry_run_again
from llamacpp_instr.recording.memory.machine import machine_memory

MAX_BYTES = 2 << 30
"""limit of the child's memory for a dry run"""

_INDICES = {"ffn_gate_tid2eid"}
"""roles of weights whose rows are looked up, not multiplied"""


def check_memory(model: ModelFile, options: ContextOptions, mmap: bool = True) -> None:
    """Raise `UsageError` for a model that must not be loaded into this process, because llama.cpp
    fails or ends the process on it, or because its context does not fit into this machine's memory.

    A few numbers in a small file can make llama.cpp allocate any amount of memory. Raises
    `NativeError` without the patched library.
    """
    _check_types(model)
    plan = plan_memory(model, options, mmap)
    # a mapped file may be larger than memory, and other devices have their own memory
    allocated = [use for use in plan.uses if use.buffer.startswith("CPU") and use.buffer != MAPPED]
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


def _check_types(model: ModelFile) -> None:
    for weight in model.weights:
        if weight.type.name in NOT_COMPUTED and weight.role not in _INDICES:
            raise UsageError(
                f"{model.path}: tensor {weight.name!r} is {weight.type}, with which llama.cpp "
                "cannot compute; convert the model to another type"
            )


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.1f} GB"


def plan_memory(model: ModelFile, options: ContextOptions, mmap: bool = True) -> MemoryBreakdown:
    """The memory of a context with the options of `instr run`; of one for embeddings if the model
    has no memory of its own.

    Raises `UsageError` for options that the model cannot run with, `LoadError` for a model that
    llama.cpp cannot load, `NativeError` without the patched library.
    """
    return in_a_child(dry_run, model, options, mmap)


def plan_memory_again(model: ModelFile, measured: MemoryBreakdown) -> MemoryBreakdown:
    """The memory of a context with the settings of a recorded one. Raises like `plan_memory`.

    No event records whether the cache of a model with sliding windows has the whole context. This
    assumes that it does only if the cache would then be as large as the measured one.
    """
    plan = in_a_child(dry_run_again, model, measured.settings)
    if plan.of_kind("cache") != measured.of_kind("cache"):
        settings = replace(measured.settings, swa_full=True)
        whole = in_a_child(dry_run_again, model, settings)
        if whole.of_kind("cache") == measured.of_kind("cache"):
            return whole
    return plan


def in_a_child(function: Callable[..., Result], model: ModelFile, *arguments: object) -> Result:
    """What `function` returns or raises for these arguments; `LoadError` if it ends its process."""
    try:
        return call_in_child(MAX_BYTES, function, model, *arguments)
    except ChildEnded as end:
        raise LoadError(f"{model.path}: llama.cpp ended the process: {end}") from None
