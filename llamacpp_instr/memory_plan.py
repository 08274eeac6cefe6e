"""Predicts what a model will hold in memory, in a process of its own.

llama.cpp trusts much of what a file's metadata claims, and ends the process where it finds that
it should not have: so the dry run is asked for in a child, and its end is one line like any other
error. The child also keeps a prediction apart from a session that is being recorded here.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import native
from .child import python
from .engine import ContextOptions
from .errors import InstrError, UsageError
from .last_words import without_directories
from .machine_memory import machine_memory
from .memory import MAPPED, MemoryBreakdown
from .memory_dry_run import LoadError, dry_run, dry_run_again
from .model_file import ModelFile

MAX_BYTES = 2 << 30
"""that the child may take for a dry run"""


def check_memory(model: ModelFile, options: ContextOptions, mmap: bool = True) -> None:
    """Raise `UsageError` for a model that must not be loaded into this process: one that llama.cpp
    fails on or ends the process on, or with a context that this machine's memory cannot hold.

    A few numbers in a file of some kilobytes can ask for any amount of memory, and llama.cpp takes
    what they ask for. Raises `NativeError` without the patched library.
    """
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


def answer() -> None:
    """The child's side: from a question on standard input to an answer on standard output."""
    function, arguments = pickle.load(sys.stdin.buffer)
    result: MemoryBreakdown | InstrError
    try:
        native.load()  # numpy takes memory for each processor of the machine: no file's claim
        _limit_memory()
        result = function(*arguments)
    except InstrError as error:
        result = error
    sys.stdout.buffer.write(pickle.dumps(result))


def _limit_memory() -> None:
    """Let this process fail where a file makes it claim more than any dry run needs."""
    try:
        import resource
    except ImportError:  # not on this operating system
        return
    try:
        held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except OSError:  # not Linux
        held = 0
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort must leave no core dump
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or most > held + MAX_BYTES:
        resource.setrlimit(resource.RLIMIT_DATA, (held + MAX_BYTES, most))


def _in_a_child(
    function: Callable[..., MemoryBreakdown], model: ModelFile, *arguments: object
) -> MemoryBreakdown:
    """What `function` of `memory_dry_run` returns or raises for these arguments."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_INSTR_")}
    done = subprocess.run(
        python(f"from {__name__} import answer; answer()"),
        input=pickle.dumps((function, (model, *arguments))),
        # without it ggml has a debugger print the stack, for seconds
        env={**environment, "GGML_NO_BACKTRACE": "1"},
        capture_output=True,
        check=False,
    )
    if done.returncode < 0:
        raise LoadError(f"{model.path}: llama.cpp ended the process: {_last_words(done)}")
    if done.returncode:
        raise RuntimeError(done.stderr.decode(errors="replace"))  # a bug of ours
    result: Any = pickle.loads(done.stdout)
    if isinstance(result, InstrError):
        raise result
    assert isinstance(result, MemoryBreakdown)
    return result


def _last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """What a process said that ended itself: the assertion of ggml's that did not hold."""
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines()]
    words = next((line for line in reversed(lines) if line), "")
    return without_directories(words) or f"signal {-done.returncode}"
