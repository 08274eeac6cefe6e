"""The debugger's command line: it prints each stop and asks how to go on.

Invariant: what a model's file names is printed escaped (`terminal.printable`).
"""

from __future__ import annotations

import cmd
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import cleandoc

from llamacpp_instr.debugger.commands import Commands
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.graph import LiveGraph
from llamacpp_instr.debugger.listing import Listing, make_listing
from llamacpp_instr.debugger.show import describe_stop
from llamacpp_instr.debugger.stop import Go, Stop
from llamacpp_instr.errors import InstrError, UsageError
from llamacpp_instr.terminal import printable_text

AROUND = 5
"""lines that `list` shows before and after the stop"""


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
        self._listing: tuple[LiveGraph, Listing] | None = None
        self._checked: set[int] = set()
        self._stopped = False

    def on_stop(self, stop: Stop) -> Go:
        """Print where the compute is, and read commands until one goes on."""
        self._stop = stop
        self._stopped = True
        self._write(f"\n{describe_stop(stop)}")
        try:
            with _interruptible():
                self.cmdloop()
        except KeyboardInterrupt:
            self._go = Go.QUIT
            os.kill(os.getpid(), signal.SIGINT)  # for whoever runs the model
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
            if point.number not in self._checked:
                point.check(graph)
                self._checked.add(point.number)

    @property
    def _now(self) -> Stop:
        assert self._stop is not None
        return self._stop

    def _write(self, text: str) -> None:
        print(printable_text(text), file=sys.stderr, flush=True)

    def _listing_of(self, graph: LiveGraph) -> Listing:
        if self._listing is None or self._listing[0] is not graph:
            self._listing = graph, make_listing(graph)
        return self._listing[1]

    # --- cmd.Cmd ---

    def onecmd(self, line: str) -> bool:
        try:
            return bool(super().onecmd(line))
        except InstrError as error:
            self._write(str(error))
            return False

    def emptyline(self) -> bool:
        return False

    def default(self, line: str) -> bool:  # type: ignore[override]
        """A command of `Commands`, or one that is shortened as long as only it begins so."""
        word = line.split()[0]
        if word in self.commands.names:
            self._write(self.commands.run(self._now, line))
            return False
        known = self.completenames(word)
        if len(known) != 1:
            hint = f": {', '.join(known)}" if known else "; `help` lists them"
            raise UsageError(f"{word!r} is {'more than one' if known else 'not a'} command{hint}")
        return self.onecmd(known[0] + line[len(word) :])

    def do_help(self, arg: str) -> None:
        """help [COMMAND]: the commands, or what one does."""
        names = self.completenames(arg.strip())
        if not names:
            raise UsageError(f"no command is called {arg.strip()!r}; `help` lists them")
        for name in names:
            text = (
                self.commands.help(name)
                if name in self.commands.names
                else cleandoc(getattr(self, f"do_{name}").__doc__ or "")
            )
            self._write(text if len(names) == 1 else f"  {text.splitlines()[0]}")

    def completenames(self, text: str, *_: object) -> list[str]:
        names = [*super().completenames(text), *self.commands.names]
        return sorted(name for name in names if name.startswith(text) and name != "EOF")

    def completedefault(self, text: str, *_: object) -> list[str]:
        """Names of tensors."""
        return [name for name in self._now.graph.by_name if name.startswith(text)]

    def _leave(self, go: Go) -> bool:
        self._go = go
        return True

    # --- how to go on ---

    def do_step(self, rest: str) -> bool:
        """step [op|block|layer|decode]: run to the end of the next op, block, layer or decode."""
        choices = {go.value: go for go in (Go.OP, Go.BLOCK, Go.LAYER, Go.DECODE)}
        word = rest.strip() or "op"
        if word not in choices:
            raise UsageError(f"step {word}: give one of {', '.join(choices)}")
        return self._leave(choices[word])

    def do_continue(self, _rest: str) -> bool:
        """continue: run to the next breakpoint."""
        return self._leave(Go.ON)

    def do_until(self, rest: str) -> bool:
        """until BREAKPOINT: run to a place once, as `until l_out-3`."""
        self.debugger.add(rest, once=True)
        return self._leave(Go.ON)

    def do_quit(self, _rest: str) -> bool:
        """quit: end the run. The log is whole."""
        return self._leave(Go.QUIT)

    def do_EOF(self, rest: str) -> bool:
        """The end of the commands: as quit."""
        return self.do_quit(rest)

    # --- breakpoints ---

    def do_break(self, rest: str) -> None:
        """break PATTERN [op=OP] [layer=3-5] [block=NAME] [step=N] [token=N] [hits=N] [if CONDITION]

        Stop after ops whose names match. A condition compares absmax, min, max, mean, std, nan,
        inf or zero: `break ffn_out-* if absmax > 60 or nan`. Without arguments: the breakpoints.
        """
        if not rest.strip():
            for point in self.debugger.breakpoints:
                self._write(f"{point.number}: {point.text}  ({point.hits} hits)")
            return
        point = self.debugger.add(rest)
        self._checked.add(point.number)
        self._write(f"breakpoint {point.number}: {point.text}")

    def do_delete(self, rest: str) -> None:
        """delete NUMBER: remove a breakpoint."""
        if not rest.strip().isdecimal():
            raise UsageError("delete NUMBER; `break` lists the numbers")
        self.debugger.remove(int(rest))

    # --- look ---

    def do_where(self, _rest: str) -> None:
        """where: the op that has just run."""
        self._write(describe_stop(self._now))

    def do_list(self, rest: str) -> None:
        """list [all]: the ops around this one, in the order in which they run."""
        listing = self._listing_of(self._now.graph)
        here = listing.line_of[self._now.node.index]
        whole = rest.strip() == "all"
        for at, line in enumerate(listing.lines, 1):
            if whole or abs(at - here) <= AROUND:
                self._write(f"{'->' if at == here else '  '} {at:4} {line}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Inside, Ctrl-C raises `KeyboardInterrupt`, also in a callback from C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGINT, before)
