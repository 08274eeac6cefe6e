"""Records what llama.cpp does while it runs: every step, layer and op, with times and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamacpp_instr.recording.session import record as record

__version__ = "0.1.0"
__all__ = ["__version__", "record"]


def __getattr__(name: str) -> Any:
    # imported lazily, because the command line imports this package for its version alone. The
    # module must not be named `record`: importing such a submodule would replace the function
    if name == "record":
        from llamacpp_instr.recording.session import record

        globals()["record"] = record
        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
