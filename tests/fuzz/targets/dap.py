"""The debug adapter's input: bytes of a client, while a model is stopped.

The demo model runs once and waits after an op; every input is answered about that stop, as if its
client had launched it.
"""

from __future__ import annotations

import functools
import io
import tempfile
import threading
from pathlib import Path
from typing import Any

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.dap.adapter import Adapter, Program
from llamacpp_instr.debugger.dap.transports import read_message, write_message
from llamacpp_instr.debugger.stop import Debugger, Go, Stop
from llamacpp_instr.run.debugging import launch
from tests.fuzz.guard import check_terminal, may_refuse

WHERE = "ffn_out-1"
_ENDED = threading.Event()


def debug_protocol(path: Path) -> None:
    sent = io.BytesIO()
    adapter = Adapter(lambda message: write_message(sent, message), check_launch)
    real, stop = stopped()
    for name in ("graph", "ubatch", "context", "step"):
        setattr(adapter.debugger, name, getattr(real, name))
    waits = threading.Thread(target=adapter.reached, args=(stop,))
    waits.start()
    try:
        with may_refuse(), path.open("rb") as source:
            while not adapter.is_over and (message := read_message(source)) is not None:
                adapter.handle(message)
    finally:
        adapter.close()
        waits.join()
    sent.seek(0)
    while (message := read_message(sent)) is not None:
        check_answer(message)


def check_answer(message: dict[str, Any]) -> None:
    for key in ("message", "output", "result"):
        check_terminal(str({**message, **(message.get("body") or {})}.get(key, "")))


def check_launch(arguments: dict[str, Any], adapter: Adapter) -> Program:
    """Checks what is launched, and runs nothing."""
    launch("demo", "a", arguments, adapter)
    raise UsageError("the model runs already")


@functools.cache
def stopped() -> tuple[Debugger, Stop]:
    """A debugger at a stop of the demo model that lasts until `end`, or until this process ends."""
    reached = threading.Event()
    stops: list[Stop] = []

    def wait(stop: Stop) -> Go:
        stops.append(stop)
        reached.set()
        _ENDED.wait()
        return Go.QUIT

    adapter = Adapter(lambda _message: None, check_launch)
    debugger = adapter.debugger
    debugger.on_stop = wait
    debugger.add(WHERE)

    def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            wanted = {"model": "demo", "prompt": "Once upon a time", "log": f"{directory}/log"}
            launch(None, None, wanted, adapter).run()

    _ENDED.clear()
    thread = threading.Thread(target=run, name=WHERE, daemon=True)
    thread.start()
    assert reached.wait(60)
    return debugger, stops[0]


def end() -> None:
    """Let the model go on to its end: while it is stopped, this process can record nothing else,
    and every other compute in it also stops."""
    _ENDED.set()
    for thread in threading.enumerate():
        if thread.name == WHERE:
            thread.join()
    stopped.cache_clear()
