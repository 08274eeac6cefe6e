"""Handlers of signals, for the time of a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handled(
    handler: Callable[[int, Any], object],
    *names: str,
    only: Callable[[Any], bool] = lambda before: before is not None,
) -> Iterator[None]:
    """Inside, `handler` handles the signals of these names that this system has, and whose handler
    before `only` accepts; by default any that Python has installed. Does nothing outside the main
    thread, which alone receives signals."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name, None) for name in names):  # Windows lacks some
            if number is not None and only(signal.getsignal(number)):
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
