"""Records what llama.cpp does while it runs: every step, layer and op, with times and tensors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamacpp_instr.converters.notebook import load as load
    from llamacpp_instr.debugger.stop import debug as debug
    from llamacpp_instr.log.reader import read_events as read_events
    from llamacpp_instr.log.session import load_session as load_session
    from llamacpp_instr.recording.session import record as record

__version__ = "0.1.0"
__all__ = ["__version__", "debug", "load", "load_session", "read_events", "record"]

_MODULES = {
    "debug": "llamacpp_instr.debugger.stop",
    "load": "llamacpp_instr.converters.notebook",
    "load_session": "llamacpp_instr.log.session",
    "read_events": "llamacpp_instr.log.reader",
    "record": "llamacpp_instr.recording.session",
}


def __getattr__(name: str) -> Any:
    # imported lazily, because the command line imports this package for its version alone. No
    # submodule may have one of these names: importing it would replace the function
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return found
