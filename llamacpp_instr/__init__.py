"""llamacpp_instr: records what llama.cpp does while it thinks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamacpp_instr.recording.session import record as record

__version__ = "0.1.0"
__all__ = ["__version__", "record"]


def __getattr__(name: str) -> Any:
    # lazily: the command line imports this package for its version alone. The module is not called
    # `record`: a submodule of that name would take the function's place once it is imported
    if name == "record":
        from llamacpp_instr.recording.session import record

        globals()["record"] = record
        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
