"""One account of time: every report's total is that of the account, to the nanosecond."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.probe import roofline
from llamacpp_instr.converters.analyses.stats import OF_KERNEL, OF_STEP, compute_stats
from llamacpp_instr.converters.analyses.step_times import StepTimes
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.converters.analyses.tree import build_tree
from llamacpp_instr.converters.exports.tables import tables_of
from llamacpp_instr.converters.fleet.rows import Row, write_rows
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.log.steps import BESIDE, KERNELS, LAYERS, Account, counted_steps
from llamacpp_instr.report.report import Report
from tests.kit.made_log import encode, make_log
from tests.kit.made_probe import probe_of_caches
from tests.kit.reports import by_title, rows

FIXTURES = Path(__file__).parent.parent / "fixtures"


def with_device(events: list[s.Event], random: Random) -> list[s.Event]:
    """The log as a device would leave it: the second part of each graph has no kernels, and the
    parts of each compute have times."""
    cut: dict[int, int] = {}
    kernels: dict[int, int] = {}
    found: list[s.Event] = []
    for event in events:
        if isinstance(event, s.Graph) and event.nodes is not None:
            n = cut[event.graph] = random.randint(1, event.n_nodes - 1)
            parts = [
                s.Split(start=0, end=n, backend="CPU"),
                s.Split(start=n, end=event.n_nodes, backend="Vulkan0"),
            ]
            found.append(replace(event, splits=parts))
        elif isinstance(event, s.Plan):
            ends = [node + n for node, n in zip(event.node, event.counts, strict=True)]
            n = kernels[event.plan] = sum(end <= cut[event.graph] for end in ends)
            found.append(replace(event, node=event.node[:n], n=event.n and event.n[:n]))
        elif isinstance(event, s.Ops):
            n = kernels[event.plan]
            columns = {name: getattr(event, name) for name in ("gap", "dur", "wait")}
            found.append(replace(event, **{name: of and of[:n] for name, of in columns.items()}))
            if event.thread == 0:
                gap, dur = ([random.randint(0, 5000) for _ in range(2)] for _ in range(2))
                found.append(
                    s.Splits(
                        t=event.t, compute=event.compute, split=[0, 1], gap=gap, dur=dur,
                        asynchronous=[0, random.getrandbits(1)],
                    )
                )  # fmt: skip
        else:
            found.append(event)
    return found


def total(report: Report, *columns: str) -> int:
    return sum(row[column] or 0 for row in rows(report) for column in columns)


def check(session: Session) -> None:
    """Each report beside the account."""
    steps, _ = counted_steps(session)
    account = Account(session, steps)
    whole = int((steps["end"] - steps["begin"]).sum())
    assert (sum(account.parts.values()) == steps["end"] - steps["begin"]).all()
    assert set(account.parts) <= {KERNELS, LAYERS, *BESIDE}
    inside = account.parts.get(KERNELS, account.parts.get(LAYERS))
    assert inside is not None
    in_kernels = int(account.parts[KERNELS].sum()) if session.ops else 0

    places, _ = account.by_place()
    assert sum(places.values()) == inside.sum()
    assert build_tree(session).root.amount == whole
    sections = by_title(compute_summary(session))
    if "Speed" in sections:
        assert total(sections["Speed"], "time") == whole
    if "Where the time went" in sections:
        assert total(sections["Where the time went"], *account.phases) == whole
    for key in OF_STEP:
        assert total(compute_stats(session, key)[0], "total") == whole
    for key in OF_KERNEL if session.ops else ():
        assert total(compute_stats(session, key)[0], "total") == in_kernels
    if not session.ops:
        assert total(compute_stats(session, "layer")[0], "total") == inside.sum()

    times = StepTimes(session)
    if session.ops:
        units = {plan: np.arange(len(session.plans[plan].node)) for plan in times.plans}
        most = max((len(of) for of in units.values()), default=0)
        in_units = np.nansum(times.by_unit(units, most), axis=0)
        order = np.argsort(steps["begin"], kind="stable")
        assert in_units.tolist() == account.parts[KERNELS][order].tolist()
        ops = tables_of(session).ops
        counted = ops[(ops.thread == 0) & ops.step.isin(steps["step"])]
        assert counted.dur.sum() == in_kernels
        try:
            reports, _ = roofline(session, probe_of_caches(session.start.host.cpu))
        except UsageError:  # no kernels in steps that count
            assert in_kernels == 0
        else:
            assert sum(total(report, "time") for report in reports) == in_kernels
    assert fleet_ns(session) == {"steps": whole, "ops": in_kernels}


def fleet_ns(session: Session) -> dict[str, int]:
    """The time in rows of a fleet's data set that count."""
    ns = {"steps": 0, "ops": 0}

    def write(table: str, found: list[Row]) -> None:
        if table in ns:
            ns[table] += sum(row["ns"] for row in found if row.get("counted", True))

    write_rows(Path(session.path), "log", write, lenient=False)
    return ns


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_every_report_adds_up_to_the_account(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Over random sessions: several contexts and threads, all levels, with and without a device."""
    events = make_log(lambda low, high: data.draw(st.integers(low, high)))
    if data.draw(st.booleans()):
        events = with_device(events, Random(data.draw(st.integers(0, 9))))
    path = tmp_path_factory.mktemp("account") / "a.log"
    path.write_bytes(encode(events))
    check(load_session(path))


@pytest.mark.parametrize("name", ["demo-verbose.log", "vulkan-mixed.log.gz", "cuda.log.gz"])
def test_a_recording_adds_up_to_the_account(name: str) -> None:
    session = load_session(FIXTURES / name)
    check(session)
    assert min(ns.min() for ns in Account(session, session.steps).parts.values()) >= 0
