"""ggml's RPC backend: servers in other processes, and `instr` as their client."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit.backends import compiled_backend
from tests.kit.native_kit import ROOT, compile_program, installed_library, locked, patched_tree
from tests.kit.programs import line, program


def rpc_library() -> Path:
    """The library of the backend."""
    return compiled_backend("rpc", ["ggml-rpc.cpp", "transport.cpp"], "-DGGML_BACKEND_DL")


def server_program() -> Path:
    """llama.cpp's own server, linked with the installed libraries."""
    place = rpc_library().parent / "server"
    with locked(place) as done:
        if not done:
            place.mkdir()
            source = patched_tree() / "tools" / "rpc" / "rpc-server.cpp"
            flags = ["-Wl,--no-as-needed", "-Wno-error"]
            compile_program(source, installed_library(), place, flags)
    return place / "rpc-server"


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
            wait_for_port(int(address.rpartition(":")[2]))
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


LISTEN, ESTABLISHED, CLOSE_WAIT = "0A", "01", "08"
"""states of a socket in /proc/net/tcp"""


def socket_states(port: int, inside: Sequence[str] = ()) -> set[str]:
    """The states of the sockets of this machine's end of a port."""
    command = [*inside, "cat", "/proc/net/tcp"]
    rows = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[1:]
    return {row.split()[3] for row in rows if row.split()[1].endswith(f":{port:04X}")}


def wait_for_port(port: int, inside: Sequence[str] = ()) -> None:
    """Until something listens there. A connection would be the server's only one."""
    until(lambda: LISTEN in socket_states(port, inside))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


#
# recorded servers
#


@dataclass(frozen=True)
class RecordedServer:
    """llama.cpp's server, recorded as `instr exec` records it."""

    address: str
    log: Path
    process: subprocess.Popen[bytes]
    inside: Sequence[str] = ()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it as a user does, when it has noticed that its clients are gone; returns its status.
        With the reply of a command, a client knows of its end before the server has noted it."""
        port = int(self.address.rpartition(":")[2])
        if number == signal.SIGTERM:
            until(lambda: socket_states(port, self.inside).isdisjoint({ESTABLISHED, CLOSE_WAIT}))
        self.process.send_signal(number)
        return self.process.wait(60)


@dataclass(frozen=True)
class Machine:
    """Where a process runs: this machine, or a network namespace of it."""

    host: str = "127.0.0.1"
    inside: Sequence[str] = ()
    """the words in front of a command"""


def _with_rpc() -> dict[str, str]:
    return {
        **os.environ, "GGML_BACKEND_PATH": str(rpc_library()), "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip


@contextlib.contextmanager
def recorded_server(
    log: Path | None, machine: Machine = Machine(), level: str = "detailed",
    environment: Mapping[str, str] | None = None, program: Path | None = None,
) -> Iterator[RecordedServer]:  # fmt: skip
    """llama.cpp's server on that machine; without a log it is not recorded. A `program` has the
    backend, which the default one loads."""
    port = free_port()
    command = [*machine.inside, str(program or server_program()), "-H", machine.host]
    recorded = {"LLAMA_INSTR_LOG": str(log), "LLAMA_INSTR_LEVEL": level} if log else {}
    base = os.environ if program else _with_rpc()
    given = {**base, **recorded, **(environment or {})}
    with subprocess.Popen(
        [*command, "-p", str(port), "-t", "1"], env=given,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            wait_for_port(port, machine.inside)
            address = f"{machine.host}:{port}"
            yield RecordedServer(address, log or Path(os.devnull), process, machine.inside)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def client(
    model: Path, out: Path, servers: Sequence[str], *options: object,
    machine: Machine = Machine(),
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """`tests/programs/rpc_session.py` on that machine, with these servers."""
    with client_process(model, out, servers, *options, machine=machine) as process:
        stdout, stderr = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def client_process(
    model: Path, out: Path, servers: Sequence[str], *options: object,
    machine: Machine = Machine(),
) -> subprocess.Popen[str]:  # fmt: skip
    words = [model, out, ",".join(servers), *options]
    return subprocess.Popen(
        [*machine.inside, sys.executable, "-m", "tests.programs.rpc_session", *map(str, words)],
        cwd=ROOT, env=_with_rpc(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


#
# networks
#


@contextlib.contextmanager
def network(servers: int, delay_ms: float = 0, mbit: float = 0) -> Iterator[list[Machine]]:
    """Machines that are connected: first the client's, then those of the servers. A packet takes
    `delay_ms` in each direction, and a link carries `mbit` million bits per second."""
    inside = [f"instr{os.getpid()}-{i}" for i in range(servers + 1)]
    with contextlib.ExitStack() as stack:
        for namespace in inside:
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "del", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        machines = [Machine("10.77.0.1", _in(inside[0]))]
        for i, namespace in enumerate(inside[1:], 1):
            words = (ROOT / "tests/programs/slow_link.py", delay_ms, mbit, inside[0], namespace)
            assert line(stack.enter_context(program(*words, f"link{i}"))) == "ready"
            for where, device, end in ((inside[0], f"link{i}", 1), (namespace, "link", 2)):
                other = f"10.77.{i}.{3 - end}"
                _ip("-n", where, "addr", "add", f"10.77.{i}.{end}", "peer", other, "dev", device)
                _ip("-n", where, "link", "set", "dev", device, "up")
            machines.append(Machine(f"10.77.{i}.2", _in(namespace)))
        yield machines


def _in(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace]


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)


#
# what goes over the wire
#


@dataclass
class CountingProxy:
    """Passes on the bytes between clients and a server, one client at a time, and counts them."""

    server: str
    listener: socket.socket = field(init=False)
    connections: list[list[int]] = field(default_factory=list)
    """of each connection, in order: bytes to the server, and from it"""

    def __post_init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def _serve(self) -> None:
        host, _, port = self.server.partition(":")
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self.listener.accept()
                counts = [0, 0]
                self.connections.append(counts)
                with client, socket.create_connection((host, int(port))) as server:
                    back = threading.Thread(target=_pump, args=(server, client, counts, 1))
                    back.start()
                    _pump(client, server, counts, 0)
                    back.join()


def _pump(source: socket.socket, to: socket.socket, counts: list[int], place: int) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            counts[place] += len(piece)
            to.sendall(piece)
    with contextlib.suppress(OSError):
        to.shutdown(socket.SHUT_WR)


def until(found: Callable[[], bool], seconds: float = 60) -> None:
    """Wait for something that must happen."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end
        time.sleep(0.02)
