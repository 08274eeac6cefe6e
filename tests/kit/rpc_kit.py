"""ggml's RPC backend: a server in another process, and `instr` as its client.

The wheel has no RPC backend. It is compiled here, from the pinned source, against the libraries of
this environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.llama.build.wheel import wheel_key
from tests.kit.native_kit import ROOT, installed_library, locked, patched_tree


def rpc_library() -> Path:
    """The library of the backend; it is built once for each source."""
    tree, library = patched_tree() / "ggml", installed_library()
    folder = tree / "src" / "ggml-rpc"
    sources = [folder / "ggml-rpc.cpp", folder / "transport.cpp"]
    texts = [path.read_text() for path in sources]
    key = wheel_key({"sources": texts, "tree": str(tree)})
    place = cache_dir() / "tests" / f"rpc-{wheel_key({'library': str(library)})}-{key}"
    with locked(place) as done:
        if not done:
            place.mkdir(parents=True)
            command = [
                os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread",
                *(f"-DGGML_{name}" for name in ("SHARED", "BACKEND_SHARED", "BACKEND_BUILD")),
                f"-I{tree / 'include'}", f"-I{tree / 'src'}", *map(str, sources),
                "-o", str(place / "libggml-rpc.so"),
                f"-L{library}", "-l:libggml-base.so.0", f"-Wl,-rpath,{library}",
            ]  # fmt: skip
            subprocess.run(command, check=True)
    return place / "libggml-rpc.so"


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
