"""The debugger's command line: it prints each stop and asks how to go on.

Invariant: what a model's file names is printed escaped (`terminal.printable`).
"""

from __future__ import annotations

import cmd
import os
import signal
import sys
from collections.abc import Sequence

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.terminal import handled, printable_text
from llamacpp_instr.debugger.commands import Commands
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.graph import LiveGraph
from llamacpp_instr.debugger.show import describe_stop
from llamacpp_instr.debugger.stop import Go, Stop


class Terminal(cmd.Cmd):
    """Asks for commands at each stop; `on_stop` is what a `Debugger` calls."""

    prompt = "(instr) "

    def __init__(self, breakpoints: Sequence[str] = ()) -> None:
        """Without breakpoints the first op is a stop. Raises `UsageError` for a wrong one."""
        super().__init__(stdin=sys.stdin, stdout=sys.stderr)
        # a terminal completes and remembers lines; a pipe is read as it is
        self.use_rawinput = sys.stdin.isatty()
        if not self.use_rawinput:
            self.prompt = ""
        self.debugger = Debugger(self.on_stop)
        self.commands = Commands(self.debugger)
        self.debugger.on_graph = self._check
        self.debugger.go = Go.ON if breakpoints else Go.OP
        for text in breakpoints:
            self.debugger.add(text)
        self._stop: Stop | None = None
        self._go = Go.ON
        self._unchecked = {point.number for point in self.debugger.breakpoints}
        self._stopped = False

    def on_stop(self, stop: Stop) -> Go:
        """Print where the compute is, and read commands until one goes on."""
        self._stop = stop
        self._stopped = True
        self._write(f"\n{describe_stop(stop)}")
        try:
            with handled(signal.default_int_handler, "SIGINT"):  # also in a callback from C
                self.cmdloop()
        except KeyboardInterrupt:
            self._go = Go.QUIT
            os.kill(os.getpid(), signal.SIGINT)  # for the code that runs the model
        finally:
            self._stop = None
        return self._go

    def end(self) -> None:
        """After the run: print what did not happen, and why."""
        for point in self.debugger.breakpoints:
            if point.hits < point.from_hit:
                self._write(
                    f"breakpoint {point.number} never stopped the run: {point.text}"
                    f"  ({point.hits} hits)"
                )
        if not self._stopped and not self.use_rawinput:
            self._write("the run never stopped, so no command on standard input was carried out")
        if self.commands.changes and self.debugger.go is Go.QUIT:
            self._write(
                "no comparison with the run without the changes: this run was ended at a stop; end"
                " the commands with `delete NUMBER` and `continue`, or give the breakpoint step=N"
            )

    def _check(self, graph: LiveGraph) -> None:
        """Raises `UsageError` if a breakpoint matches nothing of the first graph."""
        for point in self.debugger.breakpoints:
            if point.number in self._unchecked:
                point.check(graph)
        self._unchecked.clear()

    @property
    def _now(self) -> Stop:
        assert self._stop is not None
        return self._stop

    def _write(self, text: str) -> None:
        print(printable_text(text), file=sys.stderr, flush=True)

    # --- cmd.Cmd ---

    def onecmd(self, line: str) -> bool:
        """Run a command, whose name may be shortened as long as only it begins so."""
        if not line.strip():
            return False
        _, _, line = self.parseline(line)
        word = line.split()[0]
        known = ["quit"] if word == "EOF" else self.completenames(word)
        try:
            if word not in known and len(known) != 1:
                hint = f": {', '.join(known)}" if known else "; `help` lists them"
                kind = "more than one" if known else "not a"
                raise UsageError(f"{word!r} is {kind} command{hint}")
            name = word if word in known else known[0]
            output = self.commands.run(name + line[len(word) :], lambda: self._now)
        except InstrError as error:
            output = str(error)
        if isinstance(output, Go):
            self._go = output
            return True
        self._write(output or "")
        return False

    def completenames(self, text: str, *_: object) -> list[str]:
        return self.commands.named(text)

    def completedefault(self, text: str, *_: object) -> list[str]:
        """Names of tensors."""
        return [name for name in self._now.graph.by_name if name.startswith(text)]
