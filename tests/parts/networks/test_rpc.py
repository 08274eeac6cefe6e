"""ggml's RPC backend, recorded at both ends of each connection. Servers are processes of their own;
those with a delay are in network namespaces."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.log import schema
from llamacpp_instr.log.check import check_log
from tests.conftest import Instr, log_parts, read_events, start_run
from tests.kit.device_logs import check_coverage, splits_of
from tests.kit.native_kit import DEMO
from tests.kit.rpc_kit import (
    CountingProxy,
    Machine,
    RecordedServer,
    client,
    client_process,
    free_port,
    network,
    recorded_server,
    rpc_library,
    server_program,
    until,
    wait_for_port,
)

pytestmark = pytest.mark.native
Event = dict[str, Any]
CODE = {name: code for code, name in enumerate(schema.RPC_COMMANDS)}
COUNTER = 1000
"""ns by which times of the processor's counter, as those of splits, may differ from the clock's"""
COMPUTES = {CODE["GRAPH_COMPUTE"], CODE["GRAPH_RECOMPUTE"]}


@dataclass(frozen=True)
class Command:
    """A command as one end saw it, in ns of its own clock."""

    code: int
    request: int
    reply: int
    begin: int
    complete: int
    done: int
    end: int
    queued: int
    step: int
    compute: int
    split: int


def commands_of(events: Sequence[Event]) -> dict[int, list[Command]]:
    """The commands of each connection, in order. Asserts that none is missing."""
    found: dict[int, list[Command]] = {}
    for event in events:
        if event["event"] != "rpc":
            continue
        of = found.setdefault(event["connection"], [])
        assert event["first"] == len(of)
        n = len(event["command"])
        none = [-1] * n
        columns = [event.get(key, none) for key in ("step", "compute", "split")]
        server = "receive" in event
        first, second, third = (
            [event["receive"], event["work"], event["answer"]]
            if server
            else [event["send"], [0] * n, event["wait"]]
        )
        at = event["t"]
        for i in range(n):
            begin = at + event["gap"][i]
            complete = begin + first[i]
            done = complete + second[i]
            at = done + third[i]
            queued = begin - event["queue"][i] if not server else begin
            of.append(
                Command(
                    event["command"][i], event["request"][i], event["reply"][i], begin, complete,
                    done, at, queued, *(column[i] for column in columns),
                )
            )  # fmt: skip
    return found


def pairs_of(client_log: Path, server_logs: Sequence[Path]) -> list[tuple[Event, Event, Path]]:
    """The connections of a client, each with that of a server: their addresses are exchanged."""
    theirs = {
        (event["local"], event["peer"]): (event, log)
        for log in server_logs
        for event in read_events(log, "connection")
    }
    found = []
    for event in read_events(client_log, "connection"):
        of, log = theirs[event["peer"], event["local"]]
        assert (event["side"], of["side"]) == ("client", "server")
        found.append((event, of, log))
    return found


def problems(log: Path) -> list[str]:
    """What `instr check` finds in the log of a process that was ended."""
    return [of.message for of in check_log(log) if "was not closed" not in of.message]


def logits(path: Path) -> list[bytes]:
    with np.load(path) as found:
        return [found[name].tobytes() for name in found.files]


def recorded(
    folder: Path, servers: int, machines: Sequence[Machine] | None = None, *options: object
) -> tuple[Path, list[Path], list[int]]:
    """The log of a client, those of its servers, and the ns of each decode by its own clock."""
    machines = machines or [Machine()] * (servers + 1)
    logs = [folder / f"{name}.log" for name in "abc"[:servers]]
    with ExitStack() as stack:
        there = [
            stack.enter_context(recorded_server(log, machine))
            for log, machine in zip(logs, machines[1:], strict=True)
        ]
        done = client(
            DEMO, folder / "recorded.npz", [of.address for of in there],
            "--log", folder / "client.log", *options, machine=machines[0],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        for server in there:
            assert server.stop() == -signal.SIGTERM
    return folder / "client.log", logs, json.loads(done.stdout)["spans"]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The logits of this process's CPU, of the layers on one backend each."""
    out = tmp_path_factory.mktemp("local") / "local.npz"
    done = client(DEMO, out, [])
    assert done.returncode == 0, done.stderr
    return logits(out)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    log, logs, _ = recorded(tmp_path_factory.mktemp("two"), 2)
    return log, logs


@pytest.mark.parametrize("servers", [2, 3])
def test_logits_are_those_of_one_machine(servers: int, local: list[bytes], tmp_path: Path) -> None:
    client_log, logs, _ = recorded(tmp_path, servers)
    assert logits(tmp_path / "recorded.npz") == local
    with ExitStack() as stack:
        plain = [stack.enter_context(recorded_server(None)).address for _ in range(servers)]
        assert client(DEMO, tmp_path / "plain.npz", plain).returncode == 0
    assert logits(tmp_path / "plain.npz") == local
    for log in (client_log, *logs):
        assert list(check_log(log)) == []
        end = read_events(log, "session_end")[0]
        assert end["dropped"] == end["dropped_ops"] == 0


def test_both_ends_have_the_same_commands(two: tuple[Path, list[Path]]) -> None:
    log, logs = two
    ours = commands_of(read_events(log))
    pairs = pairs_of(log, logs)
    assert len(pairs) == len(ours)
    for event, other, server_log in pairs:
        sent = ours[event["connection"]]
        served = commands_of(read_events(server_log))[other["connection"]]
        assert len(sent) == len(served)
        for a, b in zip(sent, served, strict=True):
            assert (a.code, a.request, a.reply) == (b.code, b.request, b.reply)
            # both clocks are those of this machine
            assert a.queued <= a.begin <= a.complete <= a.end
            assert a.begin <= b.complete <= b.done <= b.end
            assert a.reply == 0 or b.done <= a.end
        assert sent[0].code == CODE["HELLO"]
        ends = [e for e in read_events(log, "connection_end")
                if e["connection"] == event["connection"]]  # fmt: skip
        assert [(e["reason"], e["commands"]) for e in ends] == [("closed", len(sent))]
        ends = [e for e in read_events(server_log, "connection_end")
                if e["connection"] == other["connection"]]  # fmt: skip
        assert [(e["reason"], e["commands"]) for e in ends] == [("peer", len(sent))]


def test_every_op_is_in_one_log_once(two: tuple[Path, list[Path]]) -> None:
    """A split of the client is a graph of the server, node by node."""
    log, logs = two
    events = read_events(log)
    graphs = {e["graph"]: e for e in events if e["event"] == "graph"}
    computes = {e["compute"]: e for e in events if e["event"] == "compute"}
    for server_log in logs:
        assert check_coverage(read_events(server_log))[""] > 200
    computed: Counter[tuple[int, int]] = Counter()
    for event, other, server_log in pairs_of(log, logs):
        theirs = read_events(server_log)
        their_graphs = {e["graph"]: e for e in theirs if e["event"] == "graph"}
        their_computes = {e["compute"]: e for e in theirs if e["event"] == "compute"}
        served = commands_of(theirs)[other["connection"]]
        for a, b in zip(commands_of(events)[event["connection"]], served, strict=True):
            if a.code not in COMPUTES:
                assert b.compute == -1
                continue
            computed[a.compute, a.split] += 1
            compute = their_computes[b.compute]
            assert (compute["source"], compute["ctx"]) == ("rpc", -1)
            assert compute["reused"] == (a.code == CODE["GRAPH_RECOMPUTE"])
            begin = compute["t"] + compute.get("start", 0)
            assert b.complete <= begin <= begin + compute["dur"] <= b.done
            graph = graphs[computes[a.compute]["graph"]]
            split = graph["splits"][a.split]
            assert split["backend"] == f"RPC0[{event['endpoint']}]"
            nodes, own = their_graphs[compute["graph"]]["nodes"], graph["nodes"]
            part = slice(split["start"], split["end"])
            for column in ("name", "op", "exec", "bytes", "type"):
                assert nodes[column] == own[column][part], column
    expected = Counter(
        (number, i)
        for number, compute in computes.items()
        for i, split in enumerate(graphs[compute["graph"]]["splits"])
        if split["backend"] != "CPU"
    )
    assert computed == expected
    assert sum(expected.values()) >= 2 * 9


def test_a_command_names_what_queued_it(two: tuple[Path, list[Path]]) -> None:
    """The copies of the inputs of a split come before its compute, within the time between it and
    the previous split."""
    log, _ = two
    events = read_events(log)
    steps = {e["step"]: e["t"] for e in events if e["event"] == "step_begin"}
    ends = {e["step"]: e["t"] for e in events if e["event"] == "step_end"}
    spans = splits_of(events)
    copies = 0
    for sent in commands_of(events).values():
        for of in sent:
            if of.step >= 0:
                assert steps[of.step] <= of.queued <= ends[of.step]
            if of.compute < 0:
                continue
            begin, end = spans[of.compute, of.split]
            if of.code in COMPUTES:
                assert begin - COUNTER <= of.queued <= end + COUNTER
                continue
            copies += 1
            assert of.queued <= begin + COUNTER
            assert of.split == 0 or spans[of.compute, of.split - 1][1] <= of.queued + COUNTER
    assert copies >= 9


def test_bytes_are_those_on_the_wire(tmp_path: Path) -> None:
    log, out = tmp_path / "client.log", tmp_path / "out.npz"
    with recorded_server(tmp_path / "a.log") as server:
        proxy = CountingProxy(server.address)
        done = client(DEMO, out, [proxy.address], "--log", log)
        assert done.returncode == 0, done.stderr
        server.stop()
    for path in (log, tmp_path / "a.log"):
        found = [
            [sum(of.request for of in sent), sum(of.reply for of in sent)]
            for _, sent in sorted(commands_of(read_events(path)).items())
        ]
        passed = [of for of in proxy.connections if of[0] > 0]
        if path == log:  # begun after the server was asked for its version
            passed = passed[len(passed) - len(found) :]
        assert found == passed


@pytest.mark.parametrize("delay_ms", [1, 10])
def test_a_delay_is_on_the_wire(delay_ms: int, local: list[bytes], tmp_path: Path) -> None:
    with network(2, delay_ms, mbit=1000) as machines:
        log, logs, _ = recorded(tmp_path, 2, machines, "--decodes", 4)
    assert logits(tmp_path / "recorded.npz") == local[:5]
    for event, other, server_log in pairs_of(log, logs):
        served = commands_of(read_events(server_log))[other["connection"]]
        for a, b in zip(commands_of(read_events(log))[event["connection"]], served, strict=True):
            if a.code == CODE["GET_TENSOR"]:
                there, back = b.complete - a.begin, a.end - b.done
                assert min(there, back) >= 0.99e6 * delay_ms


def test_each_part_of_a_rotated_log_has_its_connections(tmp_path: Path) -> None:
    log, out = tmp_path / "a.log", tmp_path / "out.npz"
    with recorded_server(log, environment={"LLAMA_INSTR_ROTATE": "30000"}) as server:
        assert client(DEMO, out, [server.address], "--decodes", 400).returncode == 0
        server.stop()
    parts = log_parts(log)
    assert len(parts) > 1
    computes = []
    for part in parts:
        assert list(check_log(part)) == []
        events = read_events(part)
        check_coverage(events)
        computes += [event["compute"] for event in events if event["event"] == "compute"]
        described = {event["connection"] for event in events if event["event"] == "connection"}
        assert {event["connection"] for event in events if event["event"] == "rpc"} <= described
    assert computes == list(range(len(computes)))


def test_a_server_that_dies_is_named(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(environment, "GGML_BACKEND_PATH", str(rpc_library()))
    log = tmp_path / "client.log"
    with recorded_server(tmp_path / "a.log") as server:
        options = ("--prompt", "Once upon a time", "-n", "20000", "--ctx", "30000")
        where = ("--rpc", server.address, "--log", log)
        with start_run(environment, tmp_path, "demo", *options, *where) as process:
            until(lambda: log.exists() and b'"event":"token"' in log.read_bytes())
            server.process.kill()
            _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = [of for of in stderr.decode().splitlines() if of.startswith("Error")]
    assert f"the RPC server {server.address} has gone" in line
    for path in (log, tmp_path / "a.log"):
        assert problems(path) == []
    ends = read_events(log, "connection_end")
    assert ends[-1]["reason"] == "failed"
    assert ends[-1]["commands"] == len(commands_of(read_events(log))[ends[-1]["connection"]])


def test_a_client_that_dies_leaves_the_server_to_the_next(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with recorded_server(log) as server:
        out = tmp_path / "out.npz"
        with client_process(DEMO, out, [server.address], "--decodes", 9000) as of:
            until(lambda: b'"event":"compute"' in log.read_bytes())
            of.kill()
        done = client(DEMO, tmp_path / "next.npz", [server.address])
        if server.process.poll() == -signal.SIGPIPE:
            # upstream's server sends without MSG_NOSIGNAL, so that a reply to a client that has
            # gone may end it. Its lines are whole then
            check_coverage(read_events(log))
            return
        assert done.returncode == 0, done.stderr
        server.stop()
    assert list(check_log(log)) == []
    events = read_events(log)
    check_coverage(events)
    ends = {event["connection"]: event for event in events if event["event"] == "connection_end"}
    found = commands_of(events)
    assert ends.keys() == found.keys()
    assert all(end["commands"] == len(found[number]) for number, end in ends.items())


def test_a_server_that_a_client_has_left_closes_its_log(tmp_path: Path) -> None:
    """llama.cpp's server ends by SIGPIPE if it answers then."""
    log = tmp_path / "a.log"
    with recorded_server(log) as server:
        with say_hello(server) as connection:
            server.process.send_signal(signal.SIGSTOP)
            connection.sendall(struct.pack("<BQ", CODE["DEVICE_COUNT"], 0))
        assert server.stop(signal.SIGCONT) == -signal.SIGPIPE
    assert list(check_log(log)) == []


def say_hello(server: RecordedServer) -> socket.socket:
    host, _, port = server.address.partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(struct.pack("<BQ24x", CODE["HELLO"], 24))
    assert len(connection.recv(36, socket.MSG_WAITALL)) == 36
    return connection


def tensor(number: int, op: int = 0, name: bytes = b"", ne: Sequence[int] = (4, 1, 1, 1)) -> bytes:
    """`rpc_tensor` of ggml-rpc.cpp, without data."""
    nb = (4, 4 * ne[0], 4 * ne[0], 4 * ne[0])
    numbers = [number, 0, 0, *ne, *(of % 2**32 for of in nb), op]
    return struct.pack("<QIQ4I4II64xi80xQQQ64si", *numbers, 16, 0, 0, 0, name, 0)


def graph(nodes: Sequence[int], tensors: Sequence[bytes]) -> bytes:
    head = struct.pack(f"<II{len(nodes)}QI", 0, len(nodes), *nodes, len(tensors))
    content = head + b"".join(tensors)
    return struct.pack("<BQ", CODE["GRAPH_COMPUTE"], len(content)) + content


HOSTILE = {
    "names": graph(
        [1, 2], [tensor(1, name=b"\xff\"\n"), tensor(2, name=b"x-99999999999" + b"\1" * 51)]
    ),
    "no op": graph([1], [tensor(1, op=5000)]),
    "no node": graph([1, 0], [tensor(1)]),
    "size": graph([1], [tensor(1, ne=(2**31, 2**31, 2**31, 1))]),
    "cut": graph([1], [tensor(1)])[:-1],
    "no command": b"\xee",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("level", ["detailed", "verbose"])
def test_whatever_a_client_sends_the_log_is_whole(name: str, level: str, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with recorded_server(log, level=level) as server:
        with say_hello(server) as connection:
            connection.sendall(HOSTILE[name])
        until(lambda: server.process.poll() is not None or b"connection_end" in log.read_bytes())
        survives = server.process.poll() is None
        if survives:
            assert server.stop() == -signal.SIGTERM
            assert list(check_log(log)) == []
            (found,) = commands_of(read_events(log)).values()
            assert found[0].code == CODE["HELLO"]
    assert problems(log) == []
    assert survives == (name in ("names", "cut", "no command")), "as without the recorder"
    recorded = read_events(log, "graph")
    assert len(recorded) == len(read_events(log, "compute")) == (name == "names")
    if recorded:
        assert recorded[0]["nodes"]["layer"] == [-1, -1]


def test_what_does_not_say_hello_is_not_in_the_log(tmp_path: Path) -> None:
    with recorded_server(tmp_path / "a.log") as server:
        host, _, port = server.address.partition(":")
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, int(port))) as other:
                other.sendall(text)
        with say_hello(server):
            pass
        server.stop()
    assert len(read_events(tmp_path / "a.log", "connection")) == 1


def test_instr_run_and_exec_record_both_ends(
    started_instr: Instr,
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(environment, "GGML_BACKEND_PATH", str(rpc_library()))
    port = free_port()
    words = ["exec", "--log", "a.log", "--", server_program(), "-p", port]
    with subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", *map(str, words)], cwd=tmp_path, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        wait_for_port(port)
        server = f"127.0.0.1:{port}"
        options = ("-p", "Once upon a time", "-n", "4", "--gpu-layers", "2", "--rpc", server)
        done = started_instr("run", "demo", *options, "--log", "client.log")
        assert done.returncode == 0, done.stderr
        process.terminate()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert stderr.splitlines()[-1] == f"log: {tmp_path / 'a.log'}"
    for name in ("client.log", "a.log"):
        assert list(check_log(tmp_path / name)) == []
    plain = started_instr("run", "demo", *options[:4], "--log", "plain.log")
    assert done.stdout == plain.stdout
    pairs = pairs_of(tmp_path / "client.log", [tmp_path / "a.log"])
    assert {event["endpoint"] for event, _, _ in pairs} == {server}
    (memory, *_) = read_events(tmp_path / "client.log", "memory")
    devices = {use["buffer"]: use.get("device") for use in memory["buffers"]}
    assert devices[f"RPC0[{server}]"] == "RPC0"
    assert memory["devices"] == []
