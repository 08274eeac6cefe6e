"""Finds the patched library behind `import llama_cpp` and binds its recorder.

Only `load()` returns the binding, after it has checked the library's ABI version. So every function
of a `Native` may be called.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from llamacpp_instr.base.errors import NativeError

ABI = 4
"""version of the recorder's C API that this package needs"""

OVERWRITE, STOP_ON_NAN, STOP_ON_LOG_ERROR, DEBUGGED = 1, 2, 4, 8
"""flags of `Native.begin`"""

ACTIVE, WRITE_FAILED, NAN_SEEN = 1, 2, 4
"""bits of `Native.status`"""

BEGIN, END, INSTANT = 0, 1, 2
"""phases of `Native.mark`"""


Signatures = dict[str, tuple[Any, list[Any]]]
"""by function: the type that it returns, and those of its arguments"""


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
        """Number of events that could not be written so far."""
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
        """Write the graph of such a ubatch to the log, not computed; returns its number, -1 without
        a session."""
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
            f"the installed llama-cpp-python {llama_cpp.__version__} is not the patched one "
            f"({path}); run `instr build`"
        ) from None
    abi = lib.llama_instr_abi()
    if abi != ABI:
        raise NativeError(
            f"the patched library has ABI {abi}, this package needs ABI {ABI} ({path}); "
            "run `instr build`"
        )
    _bind(lib)
    return Native(lib, path)


def import_llama_cpp() -> ModuleType:
    """The package `llama_cpp`. Raises `NativeError` if it is missing or does not load."""
    if importlib.util.find_spec("llama_cpp") is None:
        raise NativeError("the patched llama-cpp-python is not installed; run `instr build`")
    try:
        return importlib.import_module("llama_cpp")
    # a missing shared object, symbol or dependency raises any of these
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise NativeError(
            f"llama-cpp-python does not load ({reason}); run `instr build`"
        ) from error


def _bind(lib: ctypes.CDLL) -> None:
    text, i32, i64 = ctypes.c_char_p, ctypes.c_int32, ctypes.c_int64
    u32 = ctypes.c_uint32
    signatures: Signatures = {
        "info": (text, []),
        "begin": (i32, [text, text, text, text, i32]),
        "end": (i32, []),
        "error": (text, []),
        "status": (i32, []),
        "dropped": (i64, []),
        "mark": (i64, [i32, i64, text, i32]),
        "note": (i32, [text, text]),
        "memory": (i32, [ctypes.c_void_p, text, i32]),
        "reserve_graph": (i32, [ctypes.c_void_p, u32, u32, u32]),
    }
    declare({f"llama_instr_{name}": of for name, of in signatures.items()}, lib)


def declare(signatures: Signatures, lib: Any) -> None:
    """Give these functions of the library their types. Raises NativeError if it lacks one."""
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(lib, name)
        except AttributeError:
            raise NativeError(f"the installed library has no {name}; run `instr build`") from None
        function.restype, function.argtypes = result, arguments
