"""A real `llama_cpp.server` process with the demo model, plain or under `instr exec`.

Its settings keep answers complete (a waiting request interrupts no stream) and independent of other
requests (one thread, no cache of other prompts).
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.kit.native_kit import DEMO, ROOT

PATIENCE_S = 900
"""time limit for a start or an end: a machine may be stopped for minutes"""


class Server:
    """A process that answers on a loopback port, between `wait_until_it_answers` and `stop`."""

    def __init__(self, output: Path, *, under: tuple[str, ...] = (), library: Path | None = None):
        """Standard output and error go to the file `output`. `under` is a command in front of the
        server's own. `library` is the directory of another build of llama.cpp."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.output = output
        command = [
            *under, sys.executable, "-m", "llama_cpp.server", "--model", str(DEMO),
            "--host", "127.0.0.1", "--port", str(self.port), "--interrupt_requests", "false",
            "--n_ctx", "512", "--n_threads", "1", "--n_threads_batch", "1",
            "--embedding", "true", "--verbose", "false",
        ]  # fmt: skip
        path = os.environ.get("PYTHONPATH")
        env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        if library is not None:
            env["LLAMA_CPP_LIB_PATH"] = str(library)
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
        self.under = under
        self.pid = self.process.pid

    def wait_until_it_answers(self) -> None:
        """Wait until the model is loaded; raises AssertionError with the output if it fails."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                break
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                connection.request("GET", "/v1/models")
                if connection.getresponse().status == 200:
                    connection.close()
                    if self.under:
                        self.pid = self._child()
                    return
            except OSError:
                time.sleep(0.05)
        self.kill()
        raise AssertionError(f"the server did not start:\n{self.text()[-3000:]}")

    def _child(self) -> int:
        # the command in front has only this child
        pid = self.process.pid
        [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def memory(self) -> dict[str, int]:
        """Bytes of the server's memory by the kernel's names: `Rss`, `Pss`, `Private_Dirty`."""
        return memory_of(self.pid)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def stop(self, how: signal.Signals = signal.SIGINT) -> int:
        """Send a signal to the first process and wait; returns its exit status."""
        self.process.send_signal(how)
        return self.process.wait(timeout=PATIENCE_S)

    def kill(self) -> None:
        """Kill it, even if it has ended."""
        if self.process.poll() is None:
            for pid in {self.process.pid, self.pid}:
                os.kill(pid, signal.SIGKILL)
            self.process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def memory_of(pid: int) -> dict[str, int]:
    """Bytes of a process's memory by the kernel's names: `Rss`, `Pss`, `Private_Dirty`."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    found = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
    return {name: 1024 * found[name] for name in ("Rss", "Pss", "Private_Dirty")}
