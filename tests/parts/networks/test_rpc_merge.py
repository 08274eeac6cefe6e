"""`instr merge` on recorded logs. Several processes of one machine share its clock, and a time
namespace shifts it by a known time, so the truth is known to the nanosecond."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.log.steps import Account, counted_steps, untimed_splits
from tests.conftest import read_events
from tests.kit.in_process import instr_here
from tests.kit.native_kit import DEMO
from tests.kit.rpc_kit import (
    CountingProxy,
    Machine,
    client,
    client_process,
    network,
    recorded_server,
    until,
)

pytestmark = pytest.mark.native

HOUR = 3600
AN_HOUR_AHEAD = Machine(inside=["unshare", "--time", "--monotonic", str(HOUR)])
"""a program that it begins; Linux 6.3 or newer"""
Recorded = tuple[list[Path], Path, list[int]]
"""the logs, the client's first; the merged log; and by how many ns each server's clock is ahead"""


def record(
    folder: Path, machines: list[Machine], ahead: list[int], *options: object, proxy: bool = False
) -> Recorded:
    """A session of the first machine with servers on the others."""
    logs = [folder / f"{name}.log" for name in ("client", *"abc"[: len(machines) - 1])]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(recorded_server(log, machine))
            for log, machine in zip(logs[1:], machines[1:], strict=True)
        ]
        addresses = [of.address for of in servers]
        if proxy:
            addresses = [CountingProxy(of).address for of in addresses]
        words = ("--log", logs[0], *options)
        done = client(DEMO, folder / "out.npz", addresses, *words, machine=machines[0])
        assert done.returncode == 0, done.stderr
        for server in servers:
            server.stop()
        for log in logs:
            until(lambda log=log: b'"event":"session_end"' in log.read_bytes())
    return logs, merge(logs), [10**9 * seconds for seconds in ahead]


def merge(logs: list[Path], *options: str) -> Path:
    output = logs[0].with_name("session.log")
    done = instr_here("merge", *logs, "-o", output, *options)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Two servers, one of which has a clock that is an hour ahead."""
    machines = [Machine(), AN_HOUR_AHEAD, Machine()]
    return record(tmp_path_factory.mktemp("apart"), machines, [HOUR, 0], "--decodes", 20)


def by_device(session: Session) -> dict[str, Counter[str]]:
    """The kernels of each device, and their ns."""
    found: dict[str, Counter[str]] = {}
    for of in session.device_ops:
        add = Counter(kernels=of.dur.size, ns=int(of.dur.sum()), computes=len(of))
        found.setdefault(of.device, Counter()).update(add)
    return found


def test_every_kernel_of_the_servers_is_in_the_merged_log_once(apart: Recorded) -> None:
    logs, log, _ = apart
    assert list(map(str, check_log(log))) == []
    session = load_session(log)
    assert untimed_splits(session) == {}
    devices = by_device(session)
    assert len(devices) == 2
    for path, found in zip(logs[1:], devices.values(), strict=True):
        lines = read_events(path, "ops")
        assert found == Counter(
            kernels=sum(len(of["dur"]) for of in lines),
            ns=sum(sum(of["dur"]) for of in lines),
            computes=len(lines),
        )
    own = read_events(logs[0], "ops")
    assert [of["dur"] for of in read_events(log, "ops") if "device" not in of] == [
        of["dur"] for of in own
    ]


def test_a_clock_an_hour_ahead_is_known_within_the_stated_bound(apart: Recorded) -> None:
    """And so is every kernel."""
    logs, log, ahead = apart
    session = load_session(log)
    connections = session.connections.values()
    for path, truth in zip(logs[1:], ahead, strict=True):
        start = load_session(path).start
        mine = [of for of in connections if of.id == start.id]
        assert mine
        for of in mine:
            assert of.host == start.host
            assert of.drift is not None
            assert abs(of.drift) < 2e-3
            assert of.offset is not None
            assert of.uncertainty is not None
            assert abs(of.offset - truth) <= of.uncertainty
        # a server's kernels are in its order
        device = f"RPC0[{mine[-1].endpoint}]"
        theirs = [of["t"] for of in read_events(path, "ops")]
        merged = [of["t"] for of in read_events(log, "ops") if of.get("device") == device]
        error = np.array(merged) - (np.array(theirs) - truth)
        assert abs(error).max() <= session.devices[device].uncertainty


def test_the_commands_have_the_times_of_both_ends(apart: Recorded) -> None:
    logs, log, ahead = apart
    session = load_session(log)
    calls = session.calls
    assert (calls["received"] >= 0).all(), "each command is in both logs"
    uncertainty = {of.connection: of.uncertainty for of in session.connections.values()}
    slack = np.array([uncertainty[of] for of in calls["connection"].tolist()])
    assert (calls["received"] - calls["sent"] >= -slack).all()
    replied = calls["answered"] >= 0
    assert (calls["answered"] - calls["done"] >= -slack)[replied].all()
    ran = calls["ran"] >= 0
    assert ran.sum() == sum(len(read_events(path, "compute")) for path in logs[1:])
    assert (calls["received"] <= calls["ran"])[ran].all()
    assert (calls["ran_end"] <= calls["done"])[ran].all()
    assert ahead[0]


def test_the_parts_of_each_step_are_those_of_the_client(apart: Recorded) -> None:
    logs, log, _ = apart
    alone, together = (
        Account(of, counted_steps(of)[0]) for of in map(load_session, (logs[0], log))
    )
    assert together.total.tolist() == alone.total.tolist()
    for name, ns in alone.parts.items():
        assert together.parts[name].tolist() == ns.tolist(), name
    for _, busy in together.devices.values():
        assert (busy > 0).all()
        assert (busy < together.total).all()


def test_through_a_proxy_connections_are_found_by_their_commands(tmp_path: Path) -> None:
    """Its ends have other addresses."""
    logs, log, _ = record(tmp_path, [Machine()] * 3, [0, 0], proxy=True)
    assert list(map(str, check_log(log))) == []
    session = load_session(log)
    assert untimed_splits(session) == {}
    for of in session.connections.values():
        if of.id is not None:
            assert of.offset is not None
            assert of.uncertainty is not None
            assert abs(of.offset) <= of.uncertainty
    devices = by_device(session)
    for path, (device, found) in zip(logs[1:], devices.items(), strict=True):
        assert found["computes"] == len(read_events(path, "compute")), device


@pytest.mark.parametrize("delay_ms", [1, 10])
def test_a_delay_is_in_the_uncertainty_and_the_truth_within(delay_ms: int, tmp_path: Path) -> None:
    with network(2, delay_ms) as machines:
        _, log, _ = record(tmp_path, machines, [0, 0], "--decodes", 8)
    assert list(map(str, check_log(log))) == []
    session = load_session(log)
    for of in session.connections.values():
        assert of.offset is not None
        assert of.uncertainty is not None
        assert abs(of.offset) <= of.uncertainty
    for device in session.devices.values():
        assert 0.95e6 * delay_ms < device.uncertainty < 1.5e6 * delay_ms + 500_000
    calls = session.calls
    asked = calls.rows((calls["step"] >= 0) & (calls["answered"] >= 0))
    # what both directions take needs no joined clock
    wire = asked["answered"] - asked["done"] + asked["received"] - asked["sent"]
    assert wire.min() == pytest.approx(2e6 * delay_ms, rel=0.25 if delay_ms == 1 else 0.05)


def test_a_server_that_was_killed_leaves_what_it_wrote(tmp_path: Path) -> None:
    """And so does the client, which llama.cpp then ends."""
    logs = [tmp_path / name for name in ("client.log", "a.log")]
    with recorded_server(logs[1]) as server:
        words = ("--log", logs[0], "--decodes", 100_000)
        with client_process(DEMO, tmp_path / "out.npz", [server.address], *words) as process:
            until(lambda: logs[1].exists() and logs[1].read_bytes().count(b'"event":"ops"') > 100)
            server.process.kill()
            assert process.wait(60) != 0
            process.communicate()
    done = instr_here("merge", *logs, "-o", tmp_path / "session.log")
    assert done.returncode == 0, done.stderr
    assert "a.log: the log was not closed" in done.stderr
    session = load_session(tmp_path / "session.log")
    (found,) = by_device(session).values()
    assert 50 < found["computes"] <= len(read_events(logs[1], "compute"))
    wrong = "dropped", "was not closed", "came without ops", "is never ended"
    for finding in check_log(tmp_path / "session.log"):
        assert any(word in str(finding) for word in wrong), str(finding)


def test_logs_of_two_sessions_are_not_joined(tmp_path: Path) -> None:
    """Even if their commands are the same: their times are not."""
    found: list[Any] = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        found.append(record(tmp_path / name, [Machine()] * 2, [0], proxy=name == "other")[0])
    (one, _), (_, other) = found
    done = instr_here("merge", one, other, "-o", tmp_path / "session.log")
    assert done.returncode == 2
    assert f"{other}: does not belong to {one}" in done.stderr
    assert not (tmp_path / "session.log").exists()
