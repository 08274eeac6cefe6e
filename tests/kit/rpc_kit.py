"""ggml's RPC backend: a server in another process, and `instr` as its client."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.kit.backends import compiled_backend
from tests.kit.native_kit import ROOT


def rpc_library() -> Path:
    """The library of the backend."""
    return compiled_backend("rpc", ["ggml-rpc.cpp", "transport.cpp"])


@contextlib.contextmanager
def rpc_server(rpc: Path, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """The address of a server with this machine's CPU."""
    with subprocess.Popen(
        [sys.executable, ROOT / "tests" / "programs" / "rpc_server.py", rpc], cwd=ROOT,
        env={**os.environ, **(environment or {})}, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            _wait_for(address)
            yield address
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def instr_over_rpc(
    rpc: Path, address: str, *words: object, layers: int = -1
) -> subprocess.CompletedProcess[str]:
    """`instr` with the server as a device that gets the last `layers`, -1 for all."""
    return subprocess.run(
        [sys.executable, ROOT / "tests" / "programs" / "rpc_client.py", rpc, address, str(layers),
         *map(str, words)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def _wait_for(address: str) -> None:
    """Until something listens there. A connection would be the server's only one."""
    port = int(address.rpartition(":")[2])
    until = time.monotonic() + 60
    while time.monotonic() < until:
        rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
        if any(f":{port:04X} " in row and row.split()[3] == "0A" for row in rows):
            return
        time.sleep(0.05)
    raise TimeoutError(address)
