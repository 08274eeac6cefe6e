"""Sessions over several machines in reports: where the time went, the slowest link, and findings,
compared with the times that the sessions were made with."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest

from llamacpp_instr.converters.analyses.findings import Facts, Finding, find_causes
from llamacpp_instr.converters.analyses.machines import machine_names, machine_reports
from llamacpp_instr.converters.analyses.page import compute_page
from llamacpp_instr.converters.analyses.stats import compute_stats
from llamacpp_instr.log.schema import ConnectionEnd
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import Account, counted_steps
from llamacpp_instr.report.report import Report
from tests.kit.machines import HOSTS, Made, Wire, over_machines, session_over_machines
from tests.kit.reports import by_title, rows, session_of
from tests.kit.rpc_logs import Server, made_logs

MS = 1_000_000


def made(
    delay: int = 0, rate: float | None = None, runs: tuple[int, int] = (2, 2), **options: Any
) -> Made:
    """Two machines that compute for `runs` ms in each decode; the link to the second has a `delay`
    in each direction."""
    random = Random(1)
    wires = [Wire(0, random), Wire(1, random, (delay, delay), rate)]
    return over_machines(wires, [run * MS for run in runs], **options)


def account_of(session: Session) -> Account:
    return Account(session, counted_steps(session)[0])


def causes(session: Session) -> dict[str, Finding]:
    return {of.rule: of for of in find_causes(Facts(account_of(session)))}


def test_each_machine_and_link_has_its_time(tmp_path: Path) -> None:
    session = session_over_machines(tmp_path / "a.log", made(delay=MS, weights=[1 << 20] * 3))
    account = account_of(session)
    reports = by_title(machine_reports(account))
    times = {(row["Machine"], row["phase"]): row for row in rows(reports["Machines"])}
    parts = ("compute", "serialization", "wire", "queue", "waiting")
    whole = int(account.total[account.steps["phase"] == "decode"].sum())
    for host in HOSTS:
        assert times[host, "decode"]["compute"] == 39 * 2 * MS
        assert sum(times[host, "decode"][part] for part in parts) == whole
    assert times[HOSTS[1], "decode"]["wire"] == pytest.approx(39 * 2 * MS, rel=0.05)
    assert machine_names(session) == [f"{host}, A CPU" for host in HOSTS]
    near, far = rows(reports["Links"])
    assert far["round trip"] == pytest.approx(2 * MS, rel=0.05)
    assert near["round trip"] < 0.01 * MS
    assert (far["commands"], far["out"], far["in"]) == (3, 2_700 + 13 + 313, 2_312)
    assert far["clock"] == 7_000
    notes = " ".join(of for report in reports.values() for of in report.notes)
    computed = 100 * 39 * (2 * 2 * MS + 10_000) / whole  # and 10 µs of the client
    assert f"decode went, each moment counted once: compute {computed:.1f} %, wire 33." in notes
    assert (
        f"The slowest link is that to {HOSTS[1]}: a round trip of 2.00 ms, 5.21 KiB each" in notes
    )


def test_without_their_logs_machines_have_round_trips_alone(tmp_path: Path) -> None:
    session = session_over_machines(tmp_path / "a.log", made(delay=MS), merged=False)
    reports = by_title(machine_reports(account_of(session)))
    _, far = (row for row in rows(reports["Machines"]) if row["phase"] == "decode")
    assert [far[part] for part in ("compute", "serialization", "wire")] == [None] * 3
    assert far["wire or machine"] == pytest.approx(39 * 4 * MS, rel=0.05)
    assert rows(reports["Links"])[0]["clock"] is None
    assert sum("was not merged" in note for note in reports["Machines"].notes) == 2
    assert f"slowest link is that to {HOSTS[1]}" in reports["Links"].notes[0]
    assert "its wire and the machine took" in reports["Links"].notes[0]
    assert not causes(session).keys() & {"slow-link", "slow-machine"}


def test_a_session_on_one_machine_has_no_such_tables(tmp_path: Path) -> None:
    session = session_over_machines(tmp_path / "a.log", Made(made().events[:5], []))
    assert [*machine_reports(account_of(session))] == []


@pytest.mark.parametrize(("delay", "share"), [(MS // 2, None), (MS, 2 / 6.06), (4 * MS, 8 / 12.06)])
def test_a_slow_link_is_found(delay: int, share: float | None, tmp_path: Path) -> None:
    found = causes(session_over_machines(tmp_path / "a.log", made(delay=delay)))
    if share is None:
        # 1 of 5 ms, and a little for the near link
        assert found.get("slow-link", None) is None or found["slow-link"].share < 0.21
    else:
        assert found["slow-link"].share == pytest.approx(share, rel=0.03)
        assert f"The wire to {HOSTS[1]} takes" in found["slow-link"].what
        assert "a shorter path" in found["slow-link"].advice


def test_graphs_that_are_sent_again_are_found(tmp_path: Path) -> None:
    """At 12.5 MB/s, 82 kB take 6.6 ms of each decode on one of two links."""
    options: dict[str, Any] = {"rate": 12.5e6, "weights": [1 << 20] * 3}
    once = causes(session_over_machines(tmp_path / "a.log", made(**options)))
    assert "graph-again" not in once
    again = made(again=True, offload_kqv=False, **options)
    session = session_over_machines(tmp_path / "b.log", again)
    found = causes(session)["graph-again"]
    whole = int(account_of(session).total.sum())
    assert found.share == pytest.approx(39 * 82_000 / 12.5e6 * 1e9 / whole, rel=0.05)
    assert "78 of 78 graphs again, 80.1 KiB each instead of 13 B" in found.what
    assert "offload_kqv" in found.advice
    assert "rate is the limit" in causes(session)["slow-link"].advice
    with_layers = causes(session_over_machines(tmp_path / "c.log", made(again=True, **options)))
    assert "single run of layers" in with_layers["graph-again"].advice


@pytest.mark.parametrize("run", [2, 3, 6])
def test_one_machine_that_slows_all_is_found(run: int, tmp_path: Path) -> None:
    """Its cost is the time beyond the other's for the same kernels: the first machine's 16, and 17
    of the second's 19, without the last norm's weight and the output."""
    session = session_over_machines(tmp_path / "a.log", made(runs=(2, run)))
    found = causes(session).get("slow-machine")
    assert [of.dur.shape[1] for of in session.device_ops] == [16, 19]
    ratio = run / 19 / (2 / 16)
    if ratio < 1.5:
        assert found is None
    else:
        cost = 39 * 17 * (run / 19 - 2 / 16) * MS
        assert found is not None
        assert found.share == pytest.approx(cost / account_of(session).total.sum(), rel=0.01)
        assert found.what.startswith(f"{HOSTS[1]} takes {ratio:.1f} times as long as the others")


def test_statistics_and_the_page_have_machines(tmp_path: Path) -> None:
    session = session_over_machines(tmp_path / "a.log", made())
    by_device = {row["device"]: row for row in rows(compute_stats(session, "device")[0])}
    for host in HOSTS:
        assert by_device[f"RPC0[{host}]"]["total"] == 40 * 2 * MS
    _, sections = compute_page([session])
    (machines,) = (of for of in sections if isinstance(of, Report) and of.title == "Machines")
    assert {row["Machine"] for row in rows(machines)} == {*HOSTS}


@pytest.mark.parametrize("reason", ["closed", "peer", "failed"])
def test_a_machine_that_went_away_is_named(
    reason: Literal["closed", "peer", "failed"], tmp_path: Path
) -> None:
    of = made()
    end = ConnectionEnd(t=10**12, connection=1, reason=reason, commands=len(of.wires[1].rows))
    session = session_of(tmp_path / "a.log", [*of.log(), end])
    notes = by_title(machine_reports(account_of(session)))["Machines"].notes
    away = [note for note in notes if "went away" in note]
    assert [note.startswith(f"{HOSTS[1]} went away: ") for note in away] == [True] * (
        reason != "closed"
    )


def test_a_servers_own_log_says_what_it_served(tmp_path: Path) -> None:
    server = Server("10.0.0.2")
    session = session_of(tmp_path / "server.log", made_logs(1, [server]).servers[0])
    (report,) = machine_reports(account_of(session))
    row = next(row for row in rows(report) if row["Client"] == "10.0.0.1")
    assert row["connections"] == 1
    assert row["commands"] == len(server.commands)
    assert row["compute"] == int(session.computes["dur"].sum()) > 0
    served = sum(of["done"] - of["received"] for of in server.commands)
    assert row["compute"] + row["serialization"] == pytest.approx(served, abs=len(server.commands))
    assert row["received"] == sum(of["out"] for of in server.commands)
    assert "instr merge" in report.notes[0]
