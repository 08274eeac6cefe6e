"""Requests and their arguments, as types, and the run that one of them launches.

A wrong argument is one line that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.dap.sources import SourceArgument
from llamacpp_instr.debugger.stop import Go

T = TypeVar("T")
LONGER = {
    "stepIn": {"instruction": Go.OP, "line": Go.OP, "statement": Go.OP},
    "next": {"instruction": Go.OP, "line": Go.BLOCK, "statement": Go.BLOCK},
    "stepOut": {"instruction": Go.BLOCK, "line": Go.LAYER, "statement": Go.LAYER},
}
"""where a step ends, by request and by the protocol's granularity"""
BY_USER = ("launch", "continue", "pause", *LONGER)
"""requests that a user makes, so a message may pop up; an editor sends others by itself, as at each
hover, or shows the error in place"""


def parse(request: str, arguments: Any, of_type: type[T]) -> T:
    """`arguments` as `of_type`. Raises `UsageError` for a missing key or a wrong type."""
    try:
        return msgspec.convert(arguments if arguments is not None else {}, of_type)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        what, _, where = str(error).partition(" - at `$.")
        place = f"{where.rstrip('`')}: " if where else ""
        raise UsageError(f"{request}: {place}{re.sub(r'`', '', what)}") from None


class Request(msgspec.Struct):
    seq: int
    type: Literal["request", "response"]
    command: str = ""
    arguments: Any = None


class InitializeArguments(msgspec.Struct, rename="camel"):
    lines_start_at_1: bool = msgspec.field(default=True, name="linesStartAt1")
    supports_variable_paging: bool = False
    supports_variable_type: bool = False
    supports_invalidated_event: bool = False


class StackTraceArguments(msgspec.Struct, rename="camel"):
    start_frame: int = 0
    levels: int = 0


class ScopesArguments(msgspec.Struct, rename="camel"):
    frame_id: int


class SourceArguments(msgspec.Struct, rename="camel"):
    source_reference: int
    source: SourceArgument | None = None


class StepArguments(msgspec.Struct, rename="camel"):
    granularity: str = "statement"


class EvaluateArguments(msgspec.Struct, rename="camel"):
    expression: str
    context: str | None = None


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
