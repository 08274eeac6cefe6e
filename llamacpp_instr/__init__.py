"""Records what llama.cpp does while it runs: every step, layer and op, with times and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from converters.notebook import load as load
    from llamacpp_instr.debugger.api import debug as debug
    from llamacpp_instr.recording.session import record as record

__version__ = "0.1.0"
__all__ = ["__version__", "debug", "load", "record"]


def __getattr__(name: str) -> Any:
    # imported lazily, because the command line imports this package for its version alone. No
    # module may be named like one: importing such a submodule would replace the function
    if name == "record":
        from llamacpp_instr.recording.session import record

        globals()["record"] = record
        return record
    if name == "debug":
        from llamacpp_instr.debugger.api import debug

        globals()["debug"] = debug
        return debug
    if name == "load":
        from converters.notebook import load

        globals()["load"] = load
        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
