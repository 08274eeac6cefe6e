"""`instr debug --page`: the run is stopped, looked at and changed in the browser."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamacpp_instr.cli.serving import Serving
from llamacpp_instr.cli.unchanged import ComparedRun
from llamacpp_instr.debugger.api import begin_debugged
from llamacpp_instr.debugger.comparison import Comparison
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.dap.requests import Program
from llamacpp_instr.debugger.dap.transports import ends_by_signals
from llamacpp_instr.debugger.program import check_program, run_program
from llamacpp_instr.debugger.stop import Go
from llamacpp_instr.extras import need
from llamacpp_instr.recording.session import check_log_path
from llamacpp_instr.run.launch import launch
from llamacpp_instr.terminal import notice

if TYPE_CHECKING:
    from llamacpp_instr.debug_page.hub import Hub
    from llamacpp_instr.debug_page.server import DebugServer

Json = dict[str, Any]
PATIENCE_S = 3.0
"""a program that goes on after its compute was ended is interrupted then"""


def debug_model(arguments: Json, breakpoints: Sequence[str], serving: Serving) -> None:
    """Run a model by a launch configuration, and serve its page until somebody quits there, or
    Ctrl-C. Raises `UsageError` for what cannot be run, or served."""

    def make(arguments: Json, debugger: Debugger, *say: Callable[[str], None]) -> Program:
        launched = launch(arguments, None, None, debugger, *say)
        return ComparedRun(
            launched, debugger,
            lambda: bool(hub.adapter.commands.changes),
            say[1],
            lambda compared: hub.tell("instr/comparison", _comparison(*compared)),
        )  # fmt: skip

    hub, server = _serving(make, breakpoints, serving, arguments["model"])
    with ends_by_signals():
        try:
            hub.start({**arguments, "stopOnEntry": not breakpoints}, breakpoints)
            server.run(lambda: serving.show(server))
        finally:
            hub.close()
    for line in hub.lines:
        notice(line)
    if hub.exit_code:
        sys.exit(hub.exit_code)


def debug_program(
    command: Sequence[str], log: Path, force: bool, breakpoints: Sequence[str], serving: Serving
) -> None:
    """Run a Python program in this thread, and serve its page in another, until the program has
    ended and somebody quits, or Ctrl-C. Raises `UsageError` for what cannot be run, or served."""
    check_program(command)
    check_log_path(log, force, "--force")
    program = _InThisThread(stop_on_entry=not breakpoints)
    hub, server = _serving(lambda *_: program, breakpoints, serving)
    started = threading.Event()

    hub.on_quit = program.end_soon
    thread = threading.Thread(target=server.run, args=(started.set,), name="page")
    with ends_by_signals():
        try:
            session = begin_debugged(log, force, "--force")
            thread.start()
            started.wait()
            hub.start({}, breakpoints, wait=False)
            serving.show(server)
            try:
                with session, hub.adapter.debugger:
                    run_program(command)
            except RuntimeError:
                # llama_cpp raises it when a compute was ended
                if hub.adapter.debugger.go is not Go.QUIT:
                    raise
            finally:
                notice(f"log: {log}")
                program.end()
            thread.join()
        finally:
            program.end()
            hub.close()
            if thread.is_alive():
                server.stop()
                thread.join()


def _serving(
    make: Callable[..., Program],
    breakpoints: Sequence[str],
    serving: Serving,
    model: str | None = None,
) -> tuple[Hub, DebugServer]:
    """With a `model`, the page has a tab of its weights."""
    need("live")
    from converters.weights_view.tensors import Tensors
    from llamacpp_instr.debug_page.hub import Hub
    from llamacpp_instr.debug_page.looks import Looks
    from llamacpp_instr.debug_page.server import DebugServer
    from llamacpp_instr.debugger.dap.adapter import Adapter
    from llamacpp_instr.debugger.points import Breakpoint
    from llamacpp_instr.llama.threads import usable_cpus
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.weights.measure import WeightReader

    for text in breakpoints:
        Breakpoint.parse(text)
    tensors = None
    if model is not None:
        file = load_model_file(model)
        tensors = Tensors((file, WeightReader(file)), None, usable_cpus())
    hub = Hub(lambda send: Adapter(send, make), tensors is not None)
    looks = Looks(hub.adapter.commands)
    hub.adapter.more = looks.requests
    return hub, DebugServer(hub, serving.port or 0, tensors)


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
