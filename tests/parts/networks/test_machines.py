"""Where the time of real sessions over several machines went, beside the client's own clock, the
servers' own logs, and the delay that was set."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.converters.analyses.findings import Facts, Finding, find_causes
from llamacpp_instr.log.connections import join_processes, read_process
from llamacpp_instr.log.machines import COMPUTE, SERIALIZATION
from llamacpp_instr.log.merge import write_merged
from llamacpp_instr.log.runs import Run
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.log.steps import Account, counted_steps
from tests.kit.native_kit import DEMO
from tests.kit.rpc_kit import client, network, recorded_server

pytestmark = pytest.mark.native
DELAYS = (0, 1, 10)
"""ms of each way"""
MBIT = 100


@dataclass(frozen=True)
class Recorded:
    account: Account
    spans: list[int]
    """ns that the client waited for each step, by its own clock"""
    servers: list[Session]


def record(folder: Path, delay: int, mbit: int = 0, *options: str) -> Recorded:
    """A session over two machines."""
    with network(2, delay, mbit) as (near, *others), ExitStack() as stack:
        servers = [
            stack.enter_context(recorded_server(folder / f"{i}.log", machine))
            for i, machine in enumerate(others)
        ]
        log = folder / "client.log"
        addresses = [of.address for of in servers]
        done = client(DEMO, folder / "out.npz", addresses, "--log", log, *options, machine=near)
        assert done.returncode == 0, done.stderr
    logs = [log, *(of.log for of in servers)]
    merged = folder / "merged.log"
    with merged.open("wb") as file:
        write_merged(join_processes([read_process(Run((str(of),))) for of in logs]), file)
    session = load_session(merged)
    return Recorded(
        Account(session, counted_steps(session)[0]),
        json.loads(done.stdout)["spans"],
        [load_session(of) for of in logs[1:]],
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Recorded]:
    """A session for each delay."""
    return {of: record(tmp_path_factory.mktemp(f"delay{of}"), of) for of in DELAYS}


def test_the_parts_are_the_step_by_the_clients_clock(recorded: dict[int, Recorded]) -> None:
    """Within 1 %, on each machine and all together."""
    for of in recorded.values():
        account = of.account
        order = np.argsort(account.steps["begin"])
        for parts in (*account.by_machine.values(), account.of_machines):
            found = sum(parts.values())[order]
            assert sum(found) == pytest.approx(sum(of.spans), rel=0.01)


def test_a_machine_computes_as_long_as_its_own_log_says(recorded: dict[int, Recorded]) -> None:
    """By a clock that was not joined with any other."""
    for of in recorded.values():
        by_machine = of.account.by_machine
        assert len(by_machine) == len(of.servers)
        for parts, server in zip(by_machine.values(), of.servers, strict=True):
            computes, calls = server.computes, server.calls
            last = len(of.spans)
            own = int(computes["dur"][-last:].sum())
            assert int(parts[COMPUTE].sum()) == pytest.approx(own, rel=0.01)
            ours = np.isin(calls["compute"], computes["compute"][-last:])
            graphs = (calls["done"] - calls["started"])[ours]
            found = parts[SERIALIZATION]
            assert int(graphs.sum()) - own <= int(found.sum())
            # the median, because a step may lose its CPU for longer than all of them take
            assert np.median(found) < 2 * np.median(graphs)


def test_the_delay_that_was_set_is_found(recorded: dict[int, Recorded]) -> None:
    """Within 5 % of both ways, beyond the round trip of the same links without a delay."""
    trips = {
        delay: [of.account.machines.link(name).round_trip for name in of.account.machines.names]
        for delay, of in recorded.items()
    }
    for delay in DELAYS[1:]:
        for trip, least in zip(trips[delay], trips[0], strict=True):
            assert trip is not None
            assert least is not None
            assert trip - least == pytest.approx(2e6 * delay, rel=0.05)


def test_the_rate_that_was_set_is_found(tmp_path: Path) -> None:
    """Within 5 % of what TCP leaves of it: 1,448 of the 1,514 bytes of a frame."""
    of = record(tmp_path, 1, MBIT)
    expected = MBIT * 1e6 / 8 * 1448 / 1514
    for name in of.account.machines.names:
        assert of.account.machines.link(name).rate_out == pytest.approx(expected, rel=0.05)


def causes(account: Account) -> dict[str, Finding]:
    return {of.rule: of for of in find_causes(Facts(account))}


def test_a_slow_link_is_found(recorded: dict[int, Recorded]) -> None:
    for delay in DELAYS[1:]:
        found = causes(recorded[delay].account)["slow-link"]
        assert 0.3 < found.share < 0.7  # of two links, one after the other
        assert "a shorter path" in found.advice


def test_graphs_are_sent_again_if_the_cache_is_on_the_client(
    recorded: dict[int, Recorded], tmp_path: Path
) -> None:
    """Because every layer is cut in two; with the cache on the machines, each is sent once."""
    assert "graph-again" not in causes(recorded[0].account)
    found = causes(record(tmp_path, 0, MBIT, "--cache-here").account)["graph-again"]
    again = re.search(r"Decodes send ([\d,]+) of \1 graphs again", found.what)
    assert again
    assert "offload_kqv" in found.advice
