"""What `instr debug` runs: a model or a program, stopped in the terminal, by an editor or in the
browser; and a changed model again without the changes, to compare both continuations."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llamacpp_instr.base.system import need, temporary_directory
from llamacpp_instr.base.terminal import notice, print_line, printable_text
from llamacpp_instr.debugger.api import begin_debugged
from llamacpp_instr.debugger.collected import CollectedLogits
from llamacpp_instr.debugger.comparison import Comparison, Continuation, compare
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.dap.adapter import Adapter
from llamacpp_instr.debugger.dap.requests import Program
from llamacpp_instr.debugger.dap.transports import ends_by_signals, serve_stdio, serve_tcp
from llamacpp_instr.debugger.program import check_program, run_program
from llamacpp_instr.debugger.show import comparison_table
from llamacpp_instr.debugger.stop import Go
from llamacpp_instr.debugger.terminal import Terminal
from llamacpp_instr.llama.log import Interrupt
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import Token
from llamacpp_instr.recording.session import check_log_path
from llamacpp_instr.run.launch import Launched, in_keys, launch
from llamacpp_instr.run.session import RunOptions, run

if TYPE_CHECKING:
    from llamacpp_instr.debugger.page.server import DebugServer
    from llamacpp_instr.debugger.page.shared_run import SharedRun

Json = dict[str, Any]
PATIENCE_S = 3.0
"""a program that goes on after its compute was ended is interrupted then"""

Compared = tuple[Comparison, dict[int, str]]
"""both continuations token by token, and the texts of their tokens"""


class ComparedRun:
    """A run that a debug adapter launches. After changes it runs again without them, and `show`
    gets the comparison; `is_changed` says whether there were any."""

    def __init__(
        self,
        launched: Launched,
        debugger: Debugger,
        is_changed: Callable[[], bool],
        notice: Callable[[str], None],
        show: Callable[[Compared], None],
    ) -> None:
        self.stop_on_entry = launched.stop_on_entry
        self._launched, self._debugger = launched, debugger
        self._is_changed, self._notice, self._show = is_changed, notice, show
        self._interrupt = Interrupt()

    def run(self) -> None:
        """As `Launched.run`."""
        logits = CollectedLogits()
        self._debugger.witnesses.append(logits)
        self._launched.run()
        if self._is_changed() and self._debugger.go is not Go.QUIT:
            self._notice("running again without the changes, for comparison")
            options = self._launched.options
            assert options.log is not None
            self._show(compare_with_unchanged(options, options.log, logits, self._interrupt))

    def interrupt(self) -> None:
        """As `Launched.interrupt`."""
        self._launched.interrupt()
        self._interrupt.request()


def compare_with_unchanged(
    options: RunOptions, log: Path, changed: CollectedLogits, interrupt: Interrupt | None = None
) -> Compared:
    """The two continuations; `log` and `changed` are of the run with changes. Raises what `run`
    raises."""

    def continuation(log: Path, logits: CollectedLogits) -> Continuation:
        tokens = [event for _, event in read_events(log) if isinstance(event, Token)]
        texts.update({token.id: token.text for token in tokens})
        rows = np.array(logits.rows[: len(tokens)])
        return Continuation([token.id for token in tokens], rows)

    texts: dict[int, str] = {}
    logits = CollectedLogits()
    debugger = Debugger(lambda _stop: Go.ON)
    debugger.witnesses.append(logits)
    with temporary_directory("instr-unchanged-") as directory:
        other = directory / "unchanged.log"
        run(replace(options, log=other), io.BytesIO(), lambda _line: None, debugger, interrupt)
        before = continuation(other, logits)
    return compare(before, continuation(log, changed)), texts


def serve_editor(model: str | None, prompt: str | None, port: int | None) -> None:
    """Do what an editor says, over standard input and output or a port."""

    def adapter(send: Any) -> Adapter:
        def make(arguments: Any, debugger: Debugger, *say: Any) -> ComparedRun:
            def show(compared: Compared) -> None:
                comparison, texts = compared
                say[1](comparison_table(comparison, texts.__getitem__))

            launched = launch(arguments, model, prompt, debugger, *say)
            return ComparedRun(launched, debugger, is_changed, say[1], show)

        def is_changed() -> bool:
            return bool(made.commands.changes)

        made = Adapter(send, make, in_keys)
        return made

    if port is None:
        serve_stdio(adapter)
    else:
        serve_tcp(adapter, port, lambda port: print_line(f"listening on 127.0.0.1:{port}"))


def debug_model(options: RunOptions, terminal: Terminal) -> None:
    """Run a model, stopped in the terminal."""
    logits = CollectedLogits()
    terminal.debugger.witnesses.append(logits)
    written = run(options, sys.stdout.buffer, debugger=terminal.debugger)
    notice(f"log: {written}")
    terminal.end()
    if terminal.commands.changes and terminal.debugger.go is not Go.QUIT:
        notice("running again without the changes, for comparison")
        compared, texts = compare_with_unchanged(options, written, logits)
        table = comparison_table(compared, texts.__getitem__)
        print(printable_text(table), file=sys.stderr, flush=True)


def debug_program(program: Sequence[str], terminal: Terminal, log: Path, force: bool) -> None:
    """Run a Python program in this process, stopped in the terminal."""
    check_program(program)
    with begin_debugged(log, force, "--force"), terminal.debugger:
        try:
            run_program(program)
        except RuntimeError:
            # llama_cpp raises it when a compute was ended
            if terminal.debugger.go is not Go.QUIT:
                raise
    notice(f"log: {log}")
    terminal.end()


def debug_model_on_page(
    arguments: Json, breakpoints: Sequence[str], port: int, show: Callable[[str], None]
) -> int:
    """Run a model by a launch configuration, and serve its page until the user quits there, or
    Ctrl-C; `show` gets its address. Returns the exit status. Raises `UsageError` for what cannot be
    run, or served."""

    def make(arguments: Json, debugger: Debugger, *say: Callable[[str], None]) -> Program:
        launched = launch(arguments, None, None, debugger, *say)
        return ComparedRun(
            launched, debugger,
            lambda: bool(shared.adapter.commands.changes),
            say[1],
            lambda compared: shared.tell("instr/comparison", _comparison(*compared)),
        )  # fmt: skip

    shared, server = _serving(make, breakpoints, port, arguments["model"])
    with ends_by_signals():
        try:
            shared.start({**arguments, "stopOnEntry": not breakpoints}, breakpoints)
            server.run(lambda: show(server.address))
        finally:
            shared.close()
    for line in shared.lines:
        notice(line)
    return shared.exit_code or 0


def debug_program_on_page(
    command: Sequence[str],
    log: Path,
    force: bool,
    breakpoints: Sequence[str],
    port: int,
    show: Callable[[str], None],
) -> None:
    """Run a Python program in this thread, and serve its page in another, until the program has
    ended and the user quits, or Ctrl-C; `show` gets its address. Raises `UsageError` for what
    cannot be run, or served."""
    check_program(command)
    check_log_path(log, force, "--force")
    program = _InThisThread(stop_on_entry=not breakpoints)
    shared, server = _serving(lambda *_: program, breakpoints, port)
    started = threading.Event()

    shared.on_quit = program.end_soon
    thread = threading.Thread(target=server.run, args=(started.set,), name="page")
    with ends_by_signals():
        try:
            session = begin_debugged(log, force, "--force")
            thread.start()
            started.wait()
            shared.start({}, breakpoints, wait=False)
            show(server.address)
            try:
                with session, shared.adapter.debugger:
                    run_program(command)
            except RuntimeError:
                # llama_cpp raises it when a compute was ended
                if shared.adapter.debugger.go is not Go.QUIT:
                    raise
            finally:
                notice(f"log: {log}")
                program.end()
            thread.join()
        finally:
            program.end()
            shared.close()
            if thread.is_alive():
                server.stop()
                thread.join()


def _serving(
    make: Callable[..., Program],
    breakpoints: Sequence[str],
    port: int,
    model: str | None = None,
) -> tuple[SharedRun, DebugServer]:
    """With a `model`, the page has a tab of its weights."""
    need("live")
    from llamacpp_instr.debugger.dap.adapter import Adapter
    from llamacpp_instr.debugger.page.looks import Looks
    from llamacpp_instr.debugger.page.server import DebugServer
    from llamacpp_instr.debugger.page.shared_run import SharedRun
    from llamacpp_instr.debugger.points import Breakpoint
    from llamacpp_instr.lab.view.tensors import Tensors
    from llamacpp_instr.lab.weights.measure import WeightReader
    from llamacpp_instr.llama.threads import usable_cpus
    from llamacpp_instr.model.file import load_model_file

    for text in breakpoints:
        Breakpoint.parse(text)
    tensors = None
    if model is not None:
        file = load_model_file(model)
        tensors = Tensors((file, WeightReader(file)), None, usable_cpus())
    shared = SharedRun(lambda send: Adapter(send, make), tensors is not None)
    looks = Looks(shared.adapter.commands)
    shared.adapter.more = looks.requests
    return shared, DebugServer(shared, port, tensors)


class _InThisThread:
    """A program that the main thread runs, as the adapter's own thread sees it."""

    def __init__(self, stop_on_entry: bool) -> None:
        self.stop_on_entry = stop_on_entry
        self._ended = threading.Event()

    def run(self) -> None:
        self._ended.wait()

    def end(self) -> None:
        """It has ended."""
        self._ended.set()

    def end_soon(self) -> None:
        """Interrupt it unless it ends by itself, because its compute was ended."""
        timer = threading.Timer(PATIENCE_S, self.interrupt)
        timer.daemon = True
        timer.start()

    def interrupt(self) -> None:
        if not self._ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)


def _comparison(compared: Comparison, texts: dict[int, str]) -> Json:
    def text(token: int | None) -> str | None:
        return None if token is None else texts[token]

    return {
        "firstDifference": compared.first_difference,
        "steps": [
            {
                "number": step.number, "before": text(step.before), "after": text(step.after),
                "logitsBy": step.largest if step.same_past else None,
                "divergence": step.divergence if step.same_past else None,
            }
            for step in compared.steps
        ],
    }  # fmt: skip
