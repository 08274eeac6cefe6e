"""The lines of a debugger's console: how to go on, breakpoints, and the commands of a stop.

Nothing is evaluated as code: the first word of a line is the name of a command.
"""

from __future__ import annotations

from collections.abc import Callable

from llamacpp_instr.debugger.commands import Commands
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.stop import Go, Stop
from llamacpp_instr.errors import UsageError

STEPS = {go.value: go for go in (Go.OP, Go.BLOCK, Go.LAYER, Go.DECODE)}
_OWN = {
    "break": "break [TEXT]: stop there, as `break ffn_out-* if absmax > 60`, or list breakpoints",
    "delete": "delete NUMBER: remove a breakpoint",
    "continue": "continue: run to the next breakpoint",
    "until": "until TEXT: run to a place once, as `until l_out-3`",
    "step": "step [op|block|layer|decode]: run to the end of the next one",
}


class Console:
    """Runs lines; `commands` are those of a stop."""

    def __init__(self, debugger: Debugger) -> None:
        self.commands = Commands(debugger)
        self._debugger = debugger

    def run(self, line: str, stopped: Callable[[], Stop]) -> str | Go | None:
        """What a command says, or how to go on; None if the line is not a command. Raises
        `UsageError`; so does `stopped` if the model is not."""
        command, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if command == "help":
            return self._help()
        if command == "break":
            return self._break(rest)
        if command == "delete":
            if not rest.isdecimal() or len(rest) > 9:
                raise UsageError("delete NUMBER; `break` lists the numbers")
            self._debugger.remove(int(rest))
            return f"breakpoint {int(rest)} is removed"
        if command not in (*_OWN, *self.commands.names):
            return None
        stop = stopped()
        if command in self.commands.names:
            return self.commands.run(stop, line.strip())
        if command == "step" and (rest or "op") not in STEPS:
            raise UsageError(f"step {rest[:60]}: give one of {', '.join(STEPS)}")
        if command == "until":
            self._debugger.add(rest, once=True)
        return STEPS[rest or "op"] if command == "step" else Go.ON

    def _break(self, text: str) -> str:
        if text:
            point = self._debugger.add(text)
            return f"breakpoint {point.number}: {point.text}"
        lines = [f"{p.number}: {p.text}  ({p.hits} hits)" for p in self._debugger.breakpoints]
        return "\n".join(lines) or "there are no breakpoints"

    def _help(self) -> str:
        of_stop = (self.commands.help(name).splitlines()[0] for name in self.commands.names)
        return "\n".join((*_OWN.values(), *of_stop, "Other lines are names of tensors."))
