"""Predicts what a model will hold in memory, in a process of its own.

llama.cpp trusts much of what a file's metadata claims, and ends the process where it finds that
it should not have: so the dry run is asked for in a child, and its end is one line like any other
error. The child also keeps a prediction apart from a session that is being recorded here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llamacpp_instr.errors import UsageError
from llamacpp_instr.llama.child import ChildEnded, call_in_child
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.memory.breakdown import MAPPED, MemoryBreakdown
from llamacpp_instr.memory.dry_run import LoadError, dry_run, dry_run_again
from llamacpp_instr.memory.machine import machine_memory
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.model.types import NOT_COMPUTED

MAX_BYTES = 2 << 30
"""that the child may take for a dry run"""

_INDICES = {"ffn_gate_tid2eid"}
"""roles of weights that are looked up, not multiplied"""


def check_memory(model: ModelFile, options: ContextOptions, mmap: bool = True) -> None:
    """Raise `UsageError` for a model that must not be loaded into this process: one that llama.cpp
    fails on or ends the process on, or with a context that this machine's memory cannot hold.

    A few numbers in a file of some kilobytes can ask for any amount of memory, and llama.cpp takes
    what they ask for. Raises `NativeError` without the patched library.
    """
    _check_types(model)
    plan = plan_memory(model, options, mmap)
    # a mapped file may be larger than memory, and other devices have their own
    held = [use for use in plan.uses if use.buffer.startswith("CPU") and use.buffer != MAPPED]
    needed, there = sum(use.n_bytes for use in held), machine_memory()
    if there is not None and needed > there:
        parts = ", ".join(
            f"{kind} {_gb(n_bytes)}"
            for kind in ("weights", "cache", "compute")
            if (n_bytes := sum(use.n_bytes for use in held if use.kind == kind))
        )
        raise UsageError(
            f"{model.path} needs {_gb(needed)} of memory ({parts}), this machine has {_gb(there)}; "
            "a smaller --ctx needs less"
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
    """What a context made as `instr run` makes it would hold; one for embeddings when the model
    has no memory of its own.

    Raises `UsageError` for options that the model cannot be run with, `LoadError` for a model that
    llama.cpp cannot load, `NativeError` without the patched library.
    """
    return _in_a_child(dry_run, model, options, mmap)


def plan_memory_again(model: ModelFile, measured: MemoryBreakdown) -> MemoryBreakdown:
    """What a context with the settings of a recorded one would hold. Raises as `plan_memory`.

    No event tells whether the cache of a model with sliding windows holds the whole context: it
    does if only then it is as large as the measured one.
    """
    plan = _in_a_child(dry_run_again, model, measured.settings)
    if plan.of_kind("cache") != measured.of_kind("cache"):
        settings = replace(measured.settings, swa_full=True)
        whole = _in_a_child(dry_run_again, model, settings)
        if whole.of_kind("cache") == measured.of_kind("cache"):
            return whole
    return plan


def _in_a_child(
    function: Callable[..., MemoryBreakdown], model: ModelFile, *arguments: object
) -> MemoryBreakdown:
    """What `function` of `memory_dry_run` returns or raises for these arguments."""
    try:
        return call_in_child(MAX_BYTES, function, model, *arguments)
    except ChildEnded as end:
        raise LoadError(f"{model.path}: llama.cpp ended the process: {end}") from None
