"""Sessions whose log has the kernels of devices, in reports: made by hand, or recorded and
compared with their lines."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.analyses.diff import compute_diff
from llamacpp_instr.converters.analyses.findings import Facts, Finding, find_causes
from llamacpp_instr.converters.analyses.page import compute_page
from llamacpp_instr.converters.analyses.probe import roofline
from llamacpp_instr.converters.analyses.stats import compute_stats, where_filter
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.converters.analyses.tree import build_tree, device_trees
from llamacpp_instr.converters.exports.tables import tables_of
from llamacpp_instr.converters.live.frames import glance, step_details
from llamacpp_instr.converters.live.metrics import metrics_text
from llamacpp_instr.converters.live.state import LiveState
from llamacpp_instr.converters.live.tui import draw
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.log.steps import Account, counted_steps
from llamacpp_instr.prediction.probe.file import Bandwidth, DeviceLimits, Kernel
from llamacpp_instr.report.report import shown
from tests.kit.device_log import with_devices
from tests.kit.log_readers import whole_events
from tests.kit.made_log import make_log
from tests.kit.made_probe import probe_of_caches
from tests.kit.reports import by_title, rows, session_of

FIXTURES = Path(__file__).parent.parent / "fixtures"
VULKAN, PARTLY, BLAS = (
    FIXTURES / name for name in ("vulkan-timed.log.gz", "vulkan-partly.log.gz", "blas.log.gz")
)
UNTIMED = FIXTURES / "vulkan.log.gz"


def ns_by_op(log: Path) -> Counter[str]:
    """The time of each op of devices, from the lines alone; fused ops joined."""
    plans, graphs = {}, {}
    found: Counter[str] = Counter()
    for e in whole_events(log):
        if isinstance(e, s.Graph):
            graphs[e.graph] = e.whole
        elif isinstance(e, s.Plan):
            plans[e.plan] = e
        elif isinstance(e, s.Ops) and e.device:
            plan = plans[e.plan]
            nodes = graphs[plan.graph]
            for first, n, dur in zip(plan.node, plan.counts, e.dur, strict=True):
                inside = [i for i in range(first, first + n) if nodes.exec[i]]
                found["+".join(nodes.op[i] for i in inside)] += dur
    return found


# --- recorded ---


def test_a_recorded_device_has_its_ops_in_every_table() -> None:
    session = load_session(VULKAN)
    expected = ns_by_op(VULKAN)
    whole = sum(expected.values())
    device = where_filter("device=Vulkan0")
    ops = rows(compute_stats(session, "op", filters=[device])[0])
    ns: Counter[str] = Counter()
    for row in ops:
        ns["+".join(part.partition(" ")[0] for part in row["op"].split("+"))] += row["total"]
    assert ns == expected
    by_device = {row["device"]: row for row in rows(compute_stats(session, "device")[0])}
    assert by_device["Vulkan0"]["total"] == whole
    (tree,) = device_trees(session)
    assert (tree.root.name, tree.root.amount) == ("Vulkan0", whole)
    table = tables_of(session).ops
    on_device = table[table.device == "Vulkan0"]
    assert on_device.dur.sum() == whole
    assert (on_device.thread == -1).all()
    products = on_device[on_device.op == "MUL_MAT"]
    assert products.gb_per_s.notna().all()
    assert products.gflop_per_s.notna().all()
    assert (on_device.bytes >= 0).all()
    reports, _ = roofline(session, probe_of_caches(session.start.host.cpu))
    of_device = [report for report in reports if report.title.startswith("On Vulkan0")]
    assert sum(row["time"] for report in of_device for row in rows(report)) == whole
    assert all(row["attainable"] is None for report in of_device for row in rows(report))
    layers = rows(by_title(compute_summary(session))["Layers"])
    there = [row for row in layers if row["Device"] == "Vulkan0"]
    assert {row["Layer"] for row in there} == {-1, *range(4)}
    assert sum(row[phase] for row in there for phase in ("prefill", "decode")) == whole
    text = str(compute_page([session], None))
    assert "Time on Vulkan0 by layer and op" in text


def test_a_device_that_was_measured_has_roofs() -> None:
    """A device of the same name and description; its kernels are compared with its own limits."""
    session = load_session(VULKAN)
    probe = probe_of_caches(session.start.host.cpu)
    described = session.devices["Vulkan0"].description
    limits = DeviceLimits(
        "Vulkan0", described, [Bandwidth(1, 1, 4e9)], [Kernel("F16", 1, 1, 8e9)], []
    )
    for name, roofed in (("another", False), (described, True)):
        limits.description = name
        reports, charts = roofline(session, probe.with_device(limits))
        found = [of for report in reports if report.title.startswith("On") for of in rows(report)]
        assert [of["attainable"] for of in found if of["FLOP/byte"]] == [
            pytest.approx(min(8e9, 4e9 * of["FLOP/byte"])) if roofed else None
            for of in found
            if of["FLOP/byte"]
        ]
        assert any("no limits for Vulkan0" in note for note in reports[-1].notes) != roofed
        titles = ["Ops under the roofs of Vulkan0"]
        assert [chart.title for chart in charts] == titles * roofed, "the CPU multiplied nothing"
    slowest = [
        f"{report.title.rpartition(' ')[2]}: {row['op']}"
        for report in reports
        if report.title.startswith("On")
        for row in rows(report)[:5]
        if row["FLOP/byte"]
    ]
    assert re.findall(r">((?:prefill|decode): [^<]*)<", charts[0].svg()) == slowest
    assert probe.with_device(limits).with_device(limits).devices == [limits]


def test_the_execution_explains_the_waits() -> None:
    """A device that computes all layers is busy while thread 0 submits and waits, and no longer."""
    session = load_session(VULKAN)
    account = Account(session, counted_steps(session)[0])
    ((ran, busy),) = account.devices.values()
    assert (ran == busy).all(), "one queue, whose kernels do not overlap"
    on_device = account.parts["submission"] + account.parts["device waits"]
    assert (busy <= on_device + 1000).all()
    assert busy.sum() > 0.5 * on_device.sum()
    assert min(ns.min() for ns in account.parts.values()) >= 0


def test_blas_is_timed_as_what_thread_0_does() -> None:
    session = load_session(BLAS)
    sections = by_title(compute_summary(session))
    notes = [note for section in sections.values() for note in section.notes]
    assert not any("not timed" in note for note in notes)
    time = {row["Block"]: row for row in rows(sections["Where the time went"])}
    assert {"submission", "device waits", "the device"}.isdisjoint(time)
    assert time["between ops"]["prefill"] > 0
    ran = {row["device"]: row for row in rows(compute_stats(session, "device,op")[0])}
    assert set(ran) == {"CPU", "BLAS"}
    assert {row["Device"] for row in rows(sections["Top ops"])} == {"CPU", "BLAS"}
    products = rows(compute_stats(session, "op", filters=[where_filter("device=BLAS")])[0])
    assert {row["op"].split()[0] for row in products} == {"MUL_MAT"}


def test_an_untimed_backend_is_named_with_its_share() -> None:
    sections = by_title(compute_summary(load_session(UNTIMED)))
    note = "100 % of the time of the steps was on Vulkan0, whose ops are not timed."
    for title in ("Where the time went", "Top ops"):
        assert note in sections[title].notes
    whole = sections["Where the time went"]
    assert not any("need the level detailed" in of for of in whole.notes)


def test_a_session_without_any_kernel_of_the_cpu_does_not_ask_for_another_level(
    tmp_path: Path,
) -> None:
    """As with OpenVINO: the whole graph is on one backend, whose kernels are not timed."""
    events: list[s.Event] = []
    for event in make_log(Random(3).randint, 1, "detailed"):
        if isinstance(event, s.Graph):
            only = [s.Split(start=0, end=event.n_nodes, backend="OPENVINO0")]
            events.append(replace(event, splits=only))
        elif isinstance(event, s.Compute):
            events.append(event)
            events.append(s.Splits(
                t=event.t + event.start, compute=event.compute, split=[0], dur=[event.dur],
                asynchronous=[0],
            ))  # fmt: skip
        elif not isinstance(event, s.Plan | s.Ops | s.Layers):
            events.append(event)
    session = session_of(tmp_path / "a.log", events)
    sections = by_title(compute_summary(session))
    notes = [note for section in sections.values() for note in section.notes]
    notes += build_tree(session).notes
    assert not any("level detailed" in note for note in notes)
    assert any("on OPENVINO0, whose ops are not timed" in note for note in notes)


def test_two_backends_are_compared_by_role() -> None:
    """The same model on the CPU and BLAS, and on Vulkan: each weight once, wherever it is read."""
    diff = compute_diff([load_session(BLAS)], [load_session(VULKAN)], by="tensor")
    decode = next(of for of in diff.reports if of.title.startswith("Decode by tensor"))
    found = rows(decode)
    assert len(found) > 20
    assert all(row["A"] > 0 and row["B"] > 0 for row in found)


def test_live_has_late_kernels_in_their_step() -> None:
    state = LiveState()
    for _, event in state.refs.follow(read_events(VULKAN)):
        if take := state.takers.get(type(event)):
            take(event)
    expected = sum(ns_by_op(VULKAN).values())
    assert state.devices == {"Vulkan0": expected}
    seen = 0
    for row in state.steps:
        details = step_details(state, row.step)
        assert details is not None
        kernels = [kernel for kernel in details["kernels"] if kernel[5] == "Vulkan0"]
        seen += sum(kernel[4] for kernel in kernels)
        assert details["kernels"][-len(kernels) :] == kernels, "those of devices come last"
    assert seen == expected
    heat = sum(float(of.sum.sum()) for of in state.heat.values())
    assert heat > expected
    text = metrics_text(state).decode()
    assert 'llamacpp_instr_device_seconds_total{device="Vulkan0"}' in text


def test_live_shows_the_time_and_the_memory_of_a_device() -> None:
    """On the terminal and among metrics, in bytes that the log has."""
    state = LiveState()
    for _, event in state.refs.follow(read_events(FIXTURES / "devices.log")):
        if take := state.takers.get(type(event)):
            take(event)
    (memory,) = [e for e in whole_events(FIXTURES / "devices.log") if isinstance(e, s.Memory)]
    (use,) = [of for of in memory.buffers if of.device]
    held = use.model + use.context + use.compute
    (device,) = memory.devices
    spent = sum(ns_by_op(FIXTURES / "devices.log").values())
    frame = glance(state, False, 30, 120) | {"over": None}
    assert frame["devices"] == [["Vulkan0", spent, held, device.total]]
    screen = "\n".join(line.plain for line in draw(frame, 120, 30, None, False))
    busy = f"{100 * spent / frame['t']:.0f} %"
    assert re.search(rf"Vulkan0 +{busy}, {shown(held, 'bytes')}", screen)
    text = metrics_text(state).decode()
    for what, n in (("held", held), ("free", device.free), ("total", device.total)):
        line = f'device_memory_bytes{{device="Vulkan0",state="{what}"}} (.*)'
        found = re.search(line, text)
        assert found
        assert float(found[1]) == n


# --- by hand ---


def sketch(
    own: int = 10, submits: int = 10, gap: int = 0, ran: int = 10, waits: int = 10
) -> list[s.Event]:
    """A step in which the CPU computes between two parts of a device; times in µs.

    First a submission, then `gap` until the CPU's part, its kernel of `own`, half the `gap`, and a
    second submission. The device needs `ran` for each part, from its submission on. `waits` is
    after the call.
    """
    us = 1000
    begin = 10**9
    kinds = s.SessionStart | s.Model | s.Context
    facts = [e for e in make_log(Random(1).randint, 1, "detailed") if isinstance(e, kinds)]
    names = ["norm-0", "Qcur-0", "ffn_out-0"]
    nodes = s.Nodes(
        name=names, op=["RMS_NORM", "ROPE", "ADD"], layer=[0] * 3, type=["f32"] * 3,
        ne=[[8]] * 3, bytes=[32] * 3, src=[[-1], [0], [1, -1]], buffer=[0] * 3, params=[[]] * 3,
        exec=[1] * 3,
    )  # fmt: skip
    backends = ["Vulkan0", "CPU", "Vulkan0"]
    splits = [s.Split(start=i, end=i + 1, backend=name) for i, name in enumerate(backends)]
    total = (2 * submits + gap + own + gap // 2) * us
    second = begin + (submits + gap + own + gap // 2) * us
    return [
        *(replace(e, t=0) for e in facts),
        s.Device(t=0, name="Vulkan0", description="d", clock="bounded", tick=1.0, uncertainty=0),
        s.Graph(t=0, graph=0, ctx=0, uid=1, source="decode", why="first", n_nodes=3, n_exec=3,
                splits=splits, buffers=["CPU"], nodes=nodes,
                leafs=[s.Leaf(name="inp", type="f32", ne=[8], bytes=32)]),
        *(s.Plan(t=0, plan=i, graph=0, node=[i]) for i in range(3)),
        s.StepBegin(t=begin, step=0, ctx=0, kind="decode", phase="decode", n_tokens=1,
                    n_outputs=1, n_seqs=1, pos=4),
        s.Compute(t=begin, compute=0, graph=0, ctx=0, step=0, source="decode", reused=True,
                  n_threads=1, dur=total),
        s.Ops(t=begin + (submits + gap) * us, compute=0, plan=1, dur=[own * us]),
        s.Splits(t=begin, compute=0, split=[0, 1, 2], gap=[0, gap * us, gap // 2 * us],
                 dur=[submits * us, own * us, submits * us], asynchronous=[1, 0, 1]),
        s.StepEnd(t=begin + total, step=0, status=0, n_ubatch=1, n_reused=1, prepare=0,
                  readback=0),
        s.Sync(t=begin + total, ctx=0, dur=waits * us),
        s.Ops(t=begin, compute=0, plan=0, device="Vulkan0", split=0, dur=[ran * us]),
        s.Ops(t=second, compute=0, plan=2, device="Vulkan0", split=2, dur=[ran * us]),
    ]  # fmt: skip


def causes(session: Session) -> dict[str, Finding]:
    steps, _ = counted_steps(session)
    return {of.rule: of for of in find_causes(Facts(Account(session, steps)))}


@pytest.mark.parametrize(
    ("times", "rule", "share"),
    [
        # 30 of own and 40 + 20 of copies, of which the device runs 20
        ({"own": 30, "gap": 40, "ran": 30, "waits": 90}, "cpu-between", 70 / 200),
        ({"own": 3, "ran": 100, "waits": 180}, "cpu-between", 3 / 203),
        ({"own": 6, "ran": 100, "waits": 180}, "cpu-between", 6 / 206),
        # the device runs 2 x 20 of 130
        ({"own": 70, "ran": 20, "waits": 40}, "device-waits", 1 - 40 / 130),
        ({"own": 10, "submits": 40, "ran": 20, "waits": 40}, "device-waits", 1 - 40 / 130),
        ({"own": 10, "ran": 45, "waits": 90}, "device-waits", 1 - 90 / 120),
        # of the wait of 90, the device computes 80
        ({"own": 1, "submits": 2, "ran": 85, "waits": 90}, "caller-waits", None),
        ({"own": 10, "submits": 10, "ran": 40, "waits": 90}, "caller-waits", 30 / 120),
    ],
)
def test_a_finding_has_the_share_of_its_time(
    times: dict[str, int], rule: str, share: float | None, tmp_path: Path
) -> None:
    limits = {"cpu-between": 0.02, "device-waits": 0.3, "caller-waits": 0.7}
    found = causes(session_of(tmp_path / "a.log", sketch(**times)))
    if share is None:
        assert found[rule].share == pytest.approx(83 / 95)
    elif share < limits[rule]:
        assert rule not in found
    else:
        assert found[rule].share == pytest.approx(share)


def test_what_fell_back_is_named(tmp_path: Path) -> None:
    times = {"own": 30, "gap": 40, "ran": 30, "waits": 90}
    finding = causes(session_of(tmp_path / "a.log", sketch(**times)))["cpu-between"]
    assert finding.what.startswith("ROPE ran on the CPU between parts of Vulkan0: 30.0 µs in")
    launch = sketch(own=10, submits=40, ran=20, waits=40)
    waits = causes(session_of(tmp_path / "a.log", launch))["device-waits"]
    assert "submits for 62 %" in waits.what
    assert "larger batches" in waits.advice


@pytest.mark.parametrize(
    ("own", "free", "total", "layers"),
    [
        (30, 159, 10**6, None),  # the layer's weights have 100 bytes, its half of the cache 60
        (30, 160, 10**6, 1),
        (30, 10**6, 160 + 70 - 1, None),  # of the total, the context holds 70
        (30, 10**6, 160 + 70, 1),
        (5, 160, 10**6, None),
    ],
)
def test_layers_still_fit_if_what_is_free_has_room_for_them(
    own: int, free: int, total: int, layers: int | None, tmp_path: Path
) -> None:
    """The first of two layers is on the CPU. It needs 30 of 145 µs, or 5 of 120."""
    events = sketch(own=own, gap=10, submits=5, ran=40, waits=90)
    at = next(i for i, of in enumerate(events) if isinstance(of, s.Device))
    weights = {"blk.0.w": ("CPU", 100), "blk.1.w": ("Vulkan0", 10), "output.weight": ("Vulkan0", 0)}
    uses = [
        s.BufferUse(buffer="CPU", model=100, context=60),
        s.BufferUse(buffer="Vulkan0", device="Vulkan0", model=10, context=60),
    ]
    gib = 1 << 30
    has = s.DeviceMemory(device="Vulkan0", total=gib + total, free=gib + free)
    events[at:at] = [
        *(
            s.Tensor(t=0, model=0, tensor=i, name=name, type="f32", ne=[2], bytes=n, buffer=buffer)
            for i, (name, (buffer, n)) in enumerate(weights.items())
        ),
        s.Memory(t=0, ctx=0, buffers=uses, devices=[has]),
    ]
    found = causes(session_of(tmp_path / "a.log", events)).get("layers-fit")
    if layers is None:
        assert found is None
    else:
        assert found is not None
        assert found.share == pytest.approx(own / 145)
        assert found.what.startswith("1 layer on the CPU would still fit")
        assert found.advice == "Load the model with --gpu-layers 3."


def test_no_other_session_has_findings_about_devices(tmp_path: Path) -> None:
    logs = [load_session(BLAS), load_session(UNTIMED)]
    events = make_log(Random(6).randint, 1, "detailed")
    logs.append(session_of(tmp_path / "a.log", with_devices(events, Random(1), timed=False)))
    for session in logs:
        names = {"cpu-between", "device-waits", "caller-waits", "layers-fit"}
        assert not names & set(causes(session))
