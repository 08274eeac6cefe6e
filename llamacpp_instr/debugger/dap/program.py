"""A run as the adapter sees it, which another module makes of a launch configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from llamacpp_instr.debugger.control import Debugger


class Program(Protocol):
    """A run that `launch` has checked."""

    stop_on_entry: bool
    """whether its first op is a stop"""

    def run(self) -> None:
        """Run it to its end, with the debugger. Raises `InstrError` if that failed, and
        `KeyboardInterrupt` after `interrupt`."""

    def interrupt(self) -> None:
        """End it soon; called by another thread."""


Launch = Callable[[dict[str, Any], Debugger, Callable[[str], None], Callable[[str], None]], Program]
"""makes the run of a launch configuration; the functions get its text, and lines about it"""
