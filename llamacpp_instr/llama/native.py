"""Finds the patched library behind `import llama_cpp` and binds its recorder, and calls of ggml.

Only `load()` returns the binding, after it has checked the library's ABI version. So every function
of a `Native` may be called.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from llamacpp_instr.base.errors import NativeError
from llamacpp_instr.llama.build import missing_library

ABI = 4
"""version of the recorder's C API that this package needs"""

OVERWRITE, STOP_ON_NAN, STOP_ON_LOG_ERROR, DEBUGGED = 1, 2, 4, 8
"""flags of `Native.begin`"""

ACTIVE, WRITE_FAILED, NAN_SEEN = 1, 2, 4
"""bits of `Native.status`"""

BEGIN, END, INSTANT = 0, 1, 2
"""phases of `Native.mark`"""

only_bindings = False
"""Set in our own child processes before the first import: `llama_cpp` then has only the bindings.
Its own API imports a template engine, which takes as long as the work of a short child."""

POINTER = ctypes.c_void_p
Signatures = dict[str, tuple[Any, list[Any]]]
"""by function: the type that it returns, and those of its arguments"""

_TEXT, _I32, _U32, _I64 = ctypes.c_char_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64
_RECORDER: Signatures = {
    "llama_instr_info": (_TEXT, []),
    "llama_instr_begin": (_I32, [_TEXT, _TEXT, _TEXT, _TEXT, _I32]),
    "llama_instr_end": (_I32, []),
    "llama_instr_error": (_TEXT, []),
    "llama_instr_status": (_I32, []),
    "llama_instr_dropped": (_I64, []),
    "llama_instr_mark": (_I64, [_I32, _I64, _TEXT, _I32]),
    "llama_instr_note": (_I32, [_TEXT, _TEXT]),
    "llama_instr_memory": (_I32, [POINTER, _TEXT, _I32]),
    "llama_instr_reserve_graph": (_I32, [POINTER, _U32, _U32, _U32]),
}


@dataclass(frozen=True)
class Native:
    """The recorder of the loaded library."""

    lib: ctypes.CDLL
    path: Path
    """the shared library"""

    def info(self) -> dict[str, Any]:
        """The library's description of itself: the fields of `schema.Producer`."""
        info: dict[str, Any] = json.loads(self.lib.llama_instr_info())
        return info

    def begin(self, path: bytes, level: str, args: str, stats: str | None, flags: int) -> int:
        """Open a session; returns 0, or a negative errno with the reason in `error()`."""
        return int(
            self.lib.llama_instr_begin(
                path, level.encode(), args.encode(), stats.encode() if stats else None, flags
            )
        )

    def end(self) -> int:
        """Close the session; returns 0, or a negative errno if writing failed."""
        return int(self.lib.llama_instr_end())

    def error(self) -> str:
        """The text of the last error."""
        return (self.lib.llama_instr_error() or b"").decode(errors="replace")

    def status(self) -> int:
        """A combination of the bits `ACTIVE`, `WRITE_FAILED` and `NAN_SEEN`."""
        return int(self.lib.llama_instr_status())

    def dropped(self) -> int:
        """Number of events so far that could not be written."""
        return int(self.lib.llama_instr_dropped())

    def mark(self, phase: int, mark: int, name: str, seq: int = -1) -> int:
        """Begin (returns the mark's number), end or set a mark; -1 without a session."""
        return int(self.lib.llama_instr_mark(phase, mark, name.encode(), seq))

    def note(self, name: str, data: str) -> int:
        """Add an event with the application's JSON text; returns 0, or a negative errno."""
        return int(self.lib.llama_instr_note(name.encode(), data.encode()))

    def memory(self, ctx: int) -> list[dict[str, Any]]:
        """The buffers of a `llama_context *`: the fields of `schema.BufferUse`."""
        size = int(self.lib.llama_instr_memory(ctx, None, 0))
        buffer = ctypes.create_string_buffer(size + 1)
        self.lib.llama_instr_memory(ctx, buffer, size + 1)
        uses: list[dict[str, Any]] = json.loads(buffer.value)
        return uses

    def reserve_graph(self, ctx: int, n_tokens: int, n_seqs: int, n_outputs: int) -> int:
        """Write the graph of such a ubatch to the log without computing it; returns its number, -1
        without a session."""
        return int(self.lib.llama_instr_reserve_graph(ctx, n_tokens, n_seqs, n_outputs))


@functools.cache
def load() -> Native:
    """The patched library, loaded and checked. Raises `NativeError`, which says what to do."""
    llama_cpp = import_llama_cpp()
    lib: ctypes.CDLL = llama_cpp.llama_cpp._lib
    path = Path(lib._name)
    try:
        lib.llama_instr_abi.restype = ctypes.c_int32
    except AttributeError:
        raise NativeError(
            f"the installed llama-cpp-python is not the patched one ({path}); run `instr build`"
        ) from None
    abi = lib.llama_instr_abi()
    if abi != ABI:
        raise NativeError(
            f"the patched library has ABI {abi}, this package needs ABI {ABI} ({path}); "
            "run `instr build`"
        )
    return Native(declare(_RECORDER, lib), path)


def import_llama_cpp() -> ModuleType:
    """The package `llama_cpp` with its module of the same name, which has the bindings. Raises
    `NativeError` if it is missing or does not load."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None:
        raise NativeError("the patched llama-cpp-python is not installed; run `instr build`")
    if only_bindings:
        sys.modules.setdefault("llama_cpp", importlib.util.module_from_spec(spec))
    try:
        bindings = importlib.import_module("llama_cpp.llama_cpp")
        _load_backend(bindings._lib)
        return sys.modules["llama_cpp"]
    # a missing shared object, symbol or dependency raises any of these
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise NativeError(
            f"llama-cpp-python does not load ({reason}); "
            f"{missing_library(reason) or 'run `instr build`'}"
        ) from error


@functools.cache
def _load_backend(lib: ctypes.CDLL) -> None:
    """Load the backend that `GGML_BACKEND_PATH` names, as llama.cpp's programs do."""
    path = os.environ.get("GGML_BACKEND_PATH")
    if not path:
        return
    try:
        backend = ctypes.CDLL(path)  # ggml would only print why it does not load
    except OSError as error:
        cure = missing_library(str(error))
        raise NativeError(f"GGML_BACKEND_PATH: {error}{cure and f'; {cure}'}") from None
    lib.ggml_backend_load.restype = POINTER
    silent = ctypes.CFUNCTYPE(None, ctypes.c_int, _TEXT, POINTER)(lambda *_: None)
    lib.ggml_log_set(silent, None)
    loaded = lib.ggml_backend_load(os.fsencode(path))
    lib.ggml_log_set(None, None)
    if not loaded:
        known = hasattr(backend, "ggml_backend_init")
        why = (
            "finds no driver here, or belongs to another ggml" if known else "is not a ggml backend"
        )
        raise NativeError(f"GGML_BACKEND_PATH: {path} {why}")


class InitParams(ctypes.Structure):
    """`struct ggml_init_params`: ggml/include/ggml.h."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def declare(signatures: Signatures, lib: Any = None) -> Any:
    """The library, by default the loaded one, with the types of these functions. Raises NativeError
    without the patched library, or if it lacks one of them."""
    if lib is None:
        lib = load().lib
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise NativeError(f"the installed library has no {name}; run `instr build`") from None
        function.restype, function.argtypes = result, arguments
    return lib
