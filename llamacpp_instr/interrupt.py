"""Lets Ctrl-C stop a long compute between two ops instead of after the whole batch.

Python runs its signal handlers when the C call has returned; a prefill may take minutes. While the
call runs, only C may look at the flag, so the flag is a C string and the look is `strlen`: as an
abort callback (`bool (*)(void *)`) it answers 1 once the string is no longer empty.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .engine import Context


@contextmanager
def interruptible(context: Context) -> Iterator[None]:
    """Inside, SIGINT aborts the compute of `context` at once; `KeyboardInterrupt` follows.

    Needs the main thread, which alone gets signals; does nothing in others and on Windows.
    """
    if threading.current_thread() is not threading.main_thread() or os.name == "nt":
        yield
        return
    flag = ctypes.create_string_buffer(2)
    strlen = context.api.ggml_abort_callback(
        ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
    )
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)

    def watch() -> None:
        while number := os.read(receiver, 1):
            if number[0] == signal.SIGINT:
                flag.value = b"1"

    watcher = threading.Thread(target=watch, name="interrupt", daemon=True)
    watcher.start()
    context.api.llama_set_abort_callback(context.handle, strlen, ctypes.addressof(flag))
    try:
        yield
    finally:
        context.api.llama_set_abort_callback(
            context.handle, context.api.ggml_abort_callback(), None
        )
        signal.set_wakeup_fd(before)
        os.close(sender)
        watcher.join()
        os.close(receiver)
