"""One account of time: every report's total is that of the account, to the nanosecond."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.probe import roofline
from llamacpp_instr.converters.analyses.stats import OF_KERNEL, OF_STEP, compute_stats
from llamacpp_instr.converters.analyses.step_times import StepTimes
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.converters.analyses.tree import build_tree, device_trees
from llamacpp_instr.converters.exports.tables import tables_of
from llamacpp_instr.converters.fleet.rows import Row, write_rows
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.log.steps import BESIDE, KERNELS, LAYERS, Account, counted_steps
from llamacpp_instr.report.report import Report
from tests.kit.device_log import with_devices
from tests.kit.machines import Wire, over_machines
from tests.kit.made_log import encode, make_log
from tests.kit.made_probe import probe_of_caches
from tests.kit.reports import by_title, rows

FIXTURES = Path(__file__).parent.parent / "fixtures"


def total(report: Report, *columns: str) -> int:
    return sum(row[column] or 0 for row in rows(report) for column in columns)


def check(session: Session) -> None:
    """Each report beside the account."""
    steps, _ = counted_steps(session)
    account = Account(session, steps)
    whole = int((steps["end"] - steps["begin"]).sum())
    assert (sum(account.parts.values()) == steps["end"] - steps["begin"]).all()
    assert set(account.parts) <= {KERNELS, LAYERS, *BESIDE}
    for parts in (*account.by_machine.values(), account.of_machines):
        assert not parts or (sum(parts.values()) == account.total).all()
    inside = account.parts.get(KERNELS, account.parts.get(LAYERS))
    assert inside is not None
    on_devices = check_devices(session, account)
    in_kernels = on_devices + int(account.parts[KERNELS].sum()) if session.has_ops else 0

    places, _ = account.by_place()
    assert sum(ns for place, ns in places.items() if not place.device) == inside.sum()
    assert sum(tree.root.amount for tree in device_trees(session)) == on_devices
    assert build_tree(session).root.amount == whole
    sections = by_title(compute_summary(session))
    if "Speed" in sections:
        assert total(sections["Speed"], "time") == whole
    if "Where the time went" in sections:
        assert total(sections["Where the time went"], *account.phases) == whole
    for key in OF_STEP:
        assert total(compute_stats(session, key)[0], "total") == whole
    for key in OF_KERNEL if session.has_ops else ():
        assert total(compute_stats(session, key)[0], "total") == in_kernels
    if not session.has_ops:
        assert total(compute_stats(session, "layer")[0], "total") == inside.sum()

    times = StepTimes(session)
    if session.has_ops:
        units = {plan: np.arange(len(session.plans[plan].node)) for plan in times.plans}
        most = max((len(of) for of in units.values()), default=0)
        in_units = np.nansum(times.by_unit(units, most), axis=0)
        order = np.argsort(steps["begin"], kind="stable")
        on_each = sum((ran for ran, _ in account.devices.values()), account.parts[KERNELS])
        assert in_units.tolist() == on_each[order].tolist()
        ops = tables_of(session).ops
        counted = ops[(ops.thread <= 0) & ops.step.isin(steps["step"])]
        assert counted.dur.sum() == in_kernels
        try:
            reports, _ = roofline(session, probe_of_caches(session.start.host.cpu))
        except UsageError:  # no kernels in steps that count
            assert in_kernels == 0
        else:
            assert sum(total(report, "time") for report in reports) == in_kernels
    assert fleet_ns(session) == {"steps": whole, "ops": in_kernels}


def check_devices(session: Session, account: Account) -> int:
    """What each device ran, by the lines of the log, beside the account; the total in ns."""
    whole = 0
    ran: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for of in session.device_ops:
        for compute, begins, ends in zip(of.compute.tolist(), of.begin, of.end, strict=True):
            if compute in account.row:
                spans = zip(begins.tolist(), ends.tolist(), strict=True)
                ran[of.device][account.row[compute]] += spans
    assert set(ran) == set(account.devices)
    for device, (total_ns, busy) in account.devices.items():
        for row, spans in ran[device].items():
            assert total_ns[row] == sum(end - begin for begin, end in spans)
            reach = covered = 0
            for begin, end in sorted(spans):
                covered += max(end, reach) - max(begin, reach)
                reach = max(end, reach)
            assert busy[row] == covered
        whole += int(total_ns.sum())
        assert total_ns.sum() == sum(end - b for of in ran[device].values() for b, end in of)
    reports = {of.title: of for of in compute_summary(session)}
    if "Devices" in reports:
        assert total(reports["Devices"], "execution") == whole
        spent = reports["Where the time of devices went"]
        assert total(spent, *account.phases) == whole
    return whole


def fleet_ns(session: Session) -> dict[str, int]:
    """The time in those rows of a fleet's data set that count."""
    ns = {"steps": 0, "ops": 0}

    def write(table: str, found: list[Row]) -> None:
        if table in ns:
            ns[table] += sum(row["ns"] for row in found if row.get("counted", True))

    write_rows(Path(session.path), "log", write, lenient=False)
    return ns


@given(st.data())
@settings(max_examples=25)
def test_every_report_adds_up_to_the_account(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Over random sessions: several contexts and threads, all levels, with and without devices,
    whose queues overlap and whose kernels may be timed or not."""
    events = make_log(lambda low, high: data.draw(st.integers(low, high)))
    if data.draw(st.booleans()):
        random = Random(data.draw(st.integers(0, 9)))
        events = with_devices(events, random, timed=data.draw(st.booleans()))
    path = tmp_path_factory.mktemp("account") / "a.log"
    path.write_bytes(encode(events))
    check(load_session(path))


@given(st.integers(0, 99), st.booleans(), st.booleans())
@settings(max_examples=8)
def test_every_report_adds_up_over_machines(
    tmp_path_factory: pytest.TempPathFactory, seed: int, again: bool, merged: bool
) -> None:
    random = Random(seed)
    wires = [Wire(i, random, (random.randrange(10**6), 0)) for i in range(random.randint(1, 2))]
    runs = [random.randint(10_000, 10**7) for _ in wires]
    made = over_machines(wires, runs, random.randint(1, 6), again)
    path = tmp_path_factory.mktemp("account") / "a.log"
    path.write_bytes(encode(made.log(merged)))
    check(load_session(path))


@pytest.mark.parametrize(
    "name",
    ["demo-verbose.log", "vulkan-mixed.log.gz", "cuda.log.gz", "devices.log", "blas.log.gz"],
)
def test_a_recording_adds_up_to_the_account(name: str) -> None:
    session = load_session(FIXTURES / name)
    check(session)
    assert min(ns.min() for ns in Account(session, session.steps).parts.values()) >= 0
