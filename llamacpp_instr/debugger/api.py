"""`llamacpp_instr.debug`: the debugger for a program that uses llama_cpp."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.points import Breakpoint
from llamacpp_instr.debugger.stop import Go, Stop
from llamacpp_instr.recording.session import Recording, begin_session


class Debugging:
    """A session whose computes can be stopped; `debug` returns one. Use it in a `with` block."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        """the session; its log says that it is perturbed"""
        self.result: Any = None
        """what the function that `run` ran to its end returned"""
        self.on_stop: Callable[[Stop], Go | None] = lambda _stop: None
        """called at each stop in the thread that computes, while `run` is not used; it returns how
        to go on, None for `Go.ON`"""
        self.debugger = Debugger(lambda stop: self.on_stop(stop) or Go.ON)

    def add(self, breakpoint: str) -> Breakpoint:
        """A new breakpoint, as `ffn_out-* if absmax > 60`. Raises `UsageError` if it is not
        understood, or matches no op of the graph that was computed last."""
        return self.debugger.add(breakpoint)

    def remove(self, number: int) -> None:
        """Remove a breakpoint by its number. Raises `UsageError` if there is none."""
        self.debugger.remove(number)

    def run(self, function: Callable[[], Any]) -> Iterator[Stop]:
        """Run `function` in another thread and yield each stop; the compute waits meanwhile.

        Set `stop.go` to choose how it goes on (`Go.OP`, `Go.LAYER`, …); otherwise it goes on to the
        next breakpoint. `result` then has what the function returned. Raises what it raised. If the
        loop is left early, the function runs to its end without stops.
        """
        stops: queue.SimpleQueue[Stop | None] = queue.SimpleQueue()
        go: queue.SimpleQueue[Go] = queue.SimpleQueue()
        failed: list[BaseException] = []

        def wait(stop: Stop) -> Go:
            stops.put(stop)
            return go.get()

        def work() -> None:
            try:
                self.result = function()
            except BaseException as error:  # raised again by the thread that waits
                failed.append(error)
            finally:
                stops.put(None)

        before, self.on_stop = self.on_stop, wait
        thread = threading.Thread(target=work, name="debugged", daemon=True)
        thread.start()
        stop = stops.get()
        try:
            while stop is not None:
                yield stop
                go.put(stop.go)
                stop = stops.get()
        finally:
            self.on_stop = before
            if stop is not None:
                self.debugger.go = Go.ON
                go.put(Go.ON)
                thread.join()
        thread.join()
        if failed and self.debugger.error is None:
            raise failed[0]

    def __enter__(self) -> Debugging:
        self.debugger.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.debugger.__exit__()
        finally:
            self.recording.__exit__()


def debug(
    log: str | os.PathLike[str] = "debug.log", level: str = "detailed", force: bool = False
) -> Debugging:
    """Begin a session in which computes can be stopped: `with llamacpp_instr.debug() as d:`.

    `log`, `level` and `force` are as in `record`. Raises `UsageError` for a wrong argument or a log
    that cannot be opened, `NativeError` without the patched library. Begin it before the first
    decode, and while no other session is open.
    """
    return Debugging(begin_debugged(Path(log), force, "force=True", level))


def begin_debugged(log: Path, force: bool, force_option: str, level: str = "detailed") -> Recording:
    """A session whose log says that a debugger may stop its computes; arguments and errors as
    those of `begin_session`."""
    return begin_session(
        log, level=level, stats=None, args={}, force=force, force_option=force_option,
        stop_on_nan=False, on_log_error="continue", debugged=True,
    )  # fmt: skip
