"""A client's log and its servers' as one: each kernel at its true time, as far as that is known."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.connections import join_processes, read_process
from llamacpp_instr.log.merge import write_merged
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.runs import find_runs
from llamacpp_instr.log.session import load_session
from llamacpp_instr.log.steps import Account, counted_steps
from tests.kit.made_log import encode
from tests.kit.rpc_logs import MadeLogs, Server, made_logs
from tests.kit.split_log import split_log

HOUR = 3_600_000_000_000


def merged(paths: list[Path], output: Path) -> list[str]:
    """Merges logs; returns the notes."""
    joined = join_processes([read_process(run) for run in find_runs(paths)])
    with output.open("wb") as file:
        write_merged(joined, file)
    return joined.notes()


def servers(**of: int) -> list[Server]:
    return [
        Server("10.0.0.2", offset=HOUR, ppm=40, **of),
        Server("10.0.0.3", offset=-HOUR, ppm=-15, **of),
    ]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    n_steps=st.integers(1, 40),
    per_server=st.integers(1, 2),
    out=st.integers(0, 2_000_000),
    back=st.integers(0, 2_000_000),
)
def test_each_kernel_appears_once_at_its_time(
    seed: int, n_steps: int, per_server: int, out: int, back: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Clocks an hour ahead and behind, drift, and paths of unequal length."""
    tmp_path = tmp_path_factory.mktemp("merge")
    made = made_logs(seed, servers(out=out, back=back), n_steps, per_server)
    paths = made.write(tmp_path)
    for path in paths:
        assert list(map(str, check_log(path))) == []
    log = tmp_path / "session.log"
    merged(paths, log)
    assert list(map(str, check_log(log))) == []
    assert_true(made, log)


def assert_true(made: MadeLogs, log: Path) -> None:
    """The kernels of devices are those of the servers, each within its device's uncertainty."""
    session = load_session(log)
    found = {}
    for of in session.device_ops:
        plan = session.plans[of.plan]
        assert of.device in session.devices
        slack = session.devices[of.device].uncertainty
        assert slack < 10_000_000
        for row, compute in enumerate(of.compute.tolist()):
            begins, ends = of.begin[row].tolist(), of.end[row].tolist()
            splits = session.graphs[plan.graph].splits
            (split,) = (i for i, sp in enumerate(splits) if sp.start <= plan.node[0] < sp.end)
            assert (compute, split) not in found
            found[compute, split] = of.device
            device, truth = made.kernels[compute, split]
            assert of.device == device
            for node, begin, end, (k, true_begin, true_end) in zip(
                plan.node, begins, ends, truth, strict=True
            ):
                assert node == k
                assert abs(begin - true_begin) <= slack
                assert abs(end - true_end) <= slack
    assert found.keys() == made.kernels.keys()


def test_experts_of_servers_are_those_of_the_client_s_computes(tmp_path: Path) -> None:
    """Before the kernels that read them, and with those of the client."""
    made = made_logs(11, servers(), 10, 2, experts=True)
    log = tmp_path / "session.log"
    merged(made.write(tmp_path), log)
    assert list(map(str, check_log(log))) == []
    found: dict[int, dict[int, list[int]]] = {}
    timed = set()
    for _, event in read_events(log):
        if isinstance(event, s.Experts):
            assert event.compute not in found
            assert event.compute not in timed
            found[event.compute] = {node: expert for node, expert, _ in event.choices()}
        elif isinstance(event, s.Ops):
            timed.add(event.compute)
    assert len(found[0]) == 3
    assert found == made.experts


def test_a_merged_log_is_the_client_s_with_more(tmp_path: Path) -> None:
    """Steps, computes and the time that the caller saw stay the same."""
    paths = made_logs(1, servers()).write(tmp_path)
    log = tmp_path / "session.log"
    notes = merged(paths, log)
    before, after = load_session(paths[0]), load_session(log)
    assert after.steps["begin"].tolist() == before.steps["begin"].tolist()
    assert after.computes["compute"].tolist() == before.computes["compute"].tolist()
    assert after.start.id != before.start.id
    account = Account(after, counted_steps(after)[0])
    assert set(account.devices) == {"RPC0[10.0.0.2:50052]", "RPC0[10.0.0.3:50052]"}
    assert (account.total == Account(before, counted_steps(before)[0]).total).all()
    of = after.connections[0]
    assert (of.id, of.host) == ("0" * 16, before.start.host)
    assert of.offset == pytest.approx(HOUR, abs=100_000)
    assert of.uncertainty is not None
    assert of.uncertainty < 60_000
    pattern = (
        r"server-a\.log: 10\.0\.0\.2:50052, 61 of 61 commands; clock \+3,600\.00\d+ s from the"
        r" client's, within ±[\d.]+ µs \(at most [\d.]+ µs\)"
    )
    assert re.search(pattern, "\n".join(notes)), notes


def test_commands_have_the_times_of_both_ends(tmp_path: Path) -> None:
    of = servers()
    paths = made_logs(2, of).write(tmp_path)
    log = tmp_path / "session.log"
    merged(paths, log)
    session = load_session(log)
    calls = session.calls
    for number, server in enumerate(of):
        rows = calls.rows(calls["connection"] == number)
        slack = session.connections[number].uncertainty
        assert slack
        for name in ("queued", "sent", "written"):
            assert rows[name].tolist() == [row[name] for row in server.commands]
        for name in ("arrived", "received", "done", "replied"):
            truth = [row[name] for row in server.commands]
            assert abs(rows[name] - truth).max() <= slack + 2
        ran = rows.rows(rows["ran"] >= 0)
        assert [run for *_, run, _, _ in server.computes] == pytest.approx(
            ran["ran"].tolist(), abs=slack + 2
        )
        assert (ran["ran_end"] > ran["ran"]).all()
        # nothing runs backwards by more than the bound
        assert (rows["received"] - rows["sent"] >= -slack).all()
        back = rows.rows(rows["answered"] >= 0)
        assert (back["answered"] - back["done"] >= -slack).all()


def test_through_a_proxy_commands_and_clocks_say_which_connection_it_is(tmp_path: Path) -> None:
    of = [Server("10.0.0.2", HOUR, proxy="p:1"), Server("10.0.0.3", -HOUR, proxy="p:2")]
    made = made_logs(3, of)
    log = tmp_path / "session.log"
    merged(made.write(tmp_path), log)
    assert_true(made, log)


def test_logs_are_joined_in_any_order_and_one_after_the_other(tmp_path: Path) -> None:
    made = made_logs(4, servers())
    client, a, b = made.write(tmp_path)
    at_once, first, both = (tmp_path / name for name in ("at-once.log", "first.log", "both.log"))
    merged([b, client, a], at_once)
    notes = merged([client, a], first)
    assert notes[1:] == ["10.0.0.3:50052: no log of this server; its kernels have no times"]
    assert list(map(str, check_log(first))) == []
    assert set(load_session(first).devices) == {"RPC0[10.0.0.2:50052]"}
    merged([first, b], both)
    for log in (at_once, both):
        assert list(map(str, check_log(log))) == []
        assert_true(made, log)
    with pytest.raises(LogError, match=r"server-a\.log: was already merged into .*first\.log"):
        merged([first, a], tmp_path / "no.log")


def wrong(paths: list[Path], tmp_path: Path) -> str:
    with pytest.raises(LogError) as error:
        merged(paths, tmp_path / "no.log")
    message = str(error.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


def test_wrong_logs_are_refused_with_one_line(tmp_path: Path) -> None:
    made = made_logs(5, servers())
    client, a, b = made.write(tmp_path)
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    other, other_a, _ = made_logs(6, servers()).write(other_folder)
    events = [event for _, event in read_events(other)]
    other.write_bytes(encode([of_another_session(events[0]), *events[1:]]))
    assert (
        wrong([client, other, a], tmp_path)
        == "other/client.log: it is a client's log, and so is client.log; name only one"
    )
    assert (
        wrong([a, b], tmp_path) == "server-a.log: it is a server's log; also name its client's log"
    )
    assert (
        wrong([client], tmp_path) == "client.log: it is a client's log; also name its servers' logs"
    )
    plain = tmp_path / "plain.log"
    local = [event for event in made.client[1:] if not isinstance(event, s.Connection | s.Rpc)]
    plain.write_bytes(encode([of_another_session(made.client[0]), *local]))
    assert "it has no connection of llama.cpp's RPC backend" in wrong([client, plain], tmp_path)
    message = wrong([client, other_a], tmp_path)
    assert message == (
        "other/server-a.log: its clock does not fit client.log:"
        " data would arrive before it was sent"
    )
    few = made_logs(7, [Server("10.0.0.2")], n_steps=3).write(other_folder)[1]
    assert wrong([client, few], tmp_path) == (
        "other/server-a.log: does not belong to client.log: none of its 2 connections has the same"
        " commands at a possible time. It served at 10.0.0.2:50052; the client was connected to"
        " 10.0.0.2:50052, 10.0.0.3:50052"
    )


def of_another_session(event: s.Event) -> s.Event:
    assert isinstance(event, s.SessionStart)
    return structs.replace(event, id="d" * 16)


def test_a_rotated_client_is_one_log(tmp_path: Path) -> None:
    made = made_logs(10, servers())
    client, *others = made.write(tmp_path)
    connections = [event for event in made.client if isinstance(event, s.Connection)]
    parts = [client, tmp_path / "client.part2.log"]
    for path, (start, *events) in zip(parts, split_log(made.client, 2, Random(1)), strict=True):
        again = connections if path != client else []
        path.write_bytes(encode([start, *again, *events]))
    log = tmp_path / "session.log"
    merged([*others, parts[1], parts[0]], log)
    assert_true(made, log)


def test_a_graph_that_is_not_the_client_s_is_refused(tmp_path: Path) -> None:
    made = made_logs(8, servers())
    graph = next(event for event in made.servers[0] if isinstance(event, s.Graph))
    graph.whole.op[0] = "SUM"
    message = wrong(made.write(tmp_path), tmp_path)
    assert message == (
        "server-a.log: graph 0 is not split 1 of compute 0 of client.log, which asked for it"
    )


def test_kernels_of_a_server_s_own_device_may_be_late(tmp_path: Path) -> None:
    """As those of a server with Vulkan. Both uncertainties add up."""
    made = made_logs(13, servers())
    events: list[s.Event] = []
    late: list[s.Event] = []
    for of in made.servers[0]:
        event = of
        if isinstance(event, s.Graph):
            device = s.Device(
                t=event.t, name="Vulkan0", description="a GPU", clock="bounded", tick=1.0,
                uncertainty=7_000_000,
            )  # fmt: skip
            split = s.Split(start=0, end=event.n_nodes, backend="Vulkan0")
            event = structs.replace(event, splits=[split])
            events.append(device)
        elif isinstance(event, s.Ops):
            late.append(structs.replace(event, device="Vulkan0", split=0))
            continue
        elif isinstance(event, s.Compute):
            while len(late) > 3:
                events.append(late.pop(0))
        elif isinstance(event, s.Rpc) and event.connection == 4:
            events += late
            late.clear()
        events.append(event)
    made.servers[0] = events
    paths = made.write(tmp_path)
    assert all("session_end" in str(finding) for finding in check_log(paths[1])), (
        "it has more lines"
    )
    log = tmp_path / "session.log"
    merged(paths, log)
    assert list(map(str, check_log(log))) == []
    assert_true(made, log)
    device, other = (load_session(log).devices[of.device] for of in servers())
    assert 7_000_000 < device.uncertainty < 7_100_000
    assert other.uncertainty < 100_000
    assert device.description == "A CPU Vulkan0"


@pytest.mark.parametrize("which", ["client.log", "server-a.log"])
def test_a_log_without_nodes_has_commands_alone(which: str, tmp_path: Path) -> None:
    """As `--level minimal` records it."""
    paths = made_logs(12, servers()).write(tmp_path)
    path = tmp_path / which
    events: list[s.Event] = []
    for _, event in read_events(path):
        if isinstance(event, s.SessionStart):
            event = structs.replace(event, level="minimal")
        elif isinstance(event, s.Graph):
            event = structs.replace(event, nodes=None, buffers=[], leafs=[])
        if not isinstance(event, s.Plan | s.Ops):
            events.append(event)
    path.write_bytes(encode(events))
    log = tmp_path / "session.log"
    notes = merged(paths, log)
    kernels = "of servers" if which == "client.log" else "of this server"
    assert f"{which}: level minimal, so kernels {kernels} have no times" in "\n".join(notes)
    session = load_session(log)
    assert (session.calls["ran"] >= 0).sum() == 40
    timed = {"RPC0[10.0.0.3:50052]"} if which == "server-a.log" else set()
    assert session.devices.keys() == timed


def test_a_server_that_was_killed_leaves_what_it_wrote(tmp_path: Path) -> None:
    """Its last kernels are missing, and the log says so."""
    made = made_logs(9, servers())
    client, a, b = made.write(tmp_path)
    lines = a.read_bytes().splitlines(keepends=True)
    ops = [i for i, line in enumerate(lines) if line.startswith(b'{"event":"ops"')]
    rpc = [line for line in lines[ops[15] :] if line.startswith(b'{"event":"rpc"')]
    a.write_bytes(b"".join([*lines[: ops[15]], *rpc]))
    log = tmp_path / "session.log"
    notes = merged([client, a, b], log)
    assert [note for note in notes if note.endswith("server-a.log: the log was not closed")]
    found = list(map(str, check_log(log)))
    assert len(found) == 1
    assert "ops dropped" in found[0]
    session = load_session(log)
    kept = {of.device: len(of) for of in session.device_ops}
    assert kept == {"RPC0[10.0.0.2:50052]": 15, "RPC0[10.0.0.3:50052]": 20}
