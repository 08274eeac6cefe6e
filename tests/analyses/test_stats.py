"""The statistics: a case by hand, sums equal to the log's, every level, wrong input."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.stats import (
    BYS,
    OF_STEP,
    compute_stats,
    layer_filter,
    op_filter,
    parse_by,
    where_filter,
)
from llamacpp_instr.converters.exports.tables import Tables, load_tables
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.report.render import render_text
from llamacpp_instr.report.report import BOUND, AtMost, arrange
from tests.conftest import Instr, assert_refused
from tests.kit import experts_log
from tests.kit.device_log import with_devices
from tests.kit.in_process import json_reports, printed
from tests.kit.made_log import make_log
from tests.kit.reports import column, session_of
from tests.kit.steady_log import write
from tests.kit.strategies import logs, unclosed_logs

FIXTURES = Path(__file__).parent.parent / "fixtures"
RECORDED = FIXTURES / "demo-verbose.log"
OF_OPS = ("op", "layer", "block", "tensor", "type")


# --- by hand: two kernels, a warm-up step and three that count, two threads ---

DURS = {0: (9000, 9000), 1: (100, 300), 2: (200, 100), 3: (300, 200)}
WAITS = {thread: dict.fromkeys(DURS, (10 * thread, 20)) for thread in (0, 1)}


def by_hand() -> list[s.Event]:
    made = make_log(Random(1).randint, 1, "verbose")
    head = [
        replace(event, t=0)
        for event in made
        if isinstance(event, s.SessionStart | s.Model | s.Context)
    ]
    nodes = s.Nodes(
        name=["Qcur-0", "ffn_inp-0"], op=["MUL_MAT", "ADD"], layer=[0, 1], type=["f32", "f32"],
        ne=[[8], [8]], bytes=[32, 32], src=[[-1, -2], [0, -2]], buffer=[0, 0], params=[[], []],
        exec=[1, 1],
    )  # fmt: skip
    leafs = [
        s.Leaf(name="blk.0.attn_q.weight", type="f16", ne=[4, 8], bytes=64, tensor=0),
        s.Leaf(name="inp", type="f32", ne=[4], bytes=16),
    ]
    graph = s.Graph(
        t=3, graph=0, ctx=0, uid=1, source="decode", why="first", n_nodes=2, n_exec=2,
        splits=[s.Split(start=0, end=2, backend="CPU")], buffers=["CPU"], leafs=leafs, nodes=nodes,
    )  # fmt: skip
    events = [*head, graph, s.Plan(t=4, plan=0, graph=0, node=[0, 1])]
    events.append(s.Mark(t=10, mark=0, name="warm-up", phase="begin"))
    for step, dur in DURS.items():
        t = 100_000 * (step + 1)
        if step == 1:
            events.append(s.Mark(t=t - 1, mark=0, name="warm-up", phase="end"))
        begin = s.StepBegin(
            t=t, step=step, ctx=0, kind="decode", phase="decode" if step > 1 else "prefill",
            n_tokens=1, n_outputs=1, n_seqs=1,
        )  # fmt: skip
        compute = s.Compute(
            t=t, compute=step, graph=0, ctx=0, step=step, source="decode", reused=step > 0,
            n_threads=2, dur=sum(dur),
        )  # fmt: skip
        events += [begin, compute]
        for thread in (0, 1):
            wait = list(WAITS[thread][step])
            events.append(s.Ops(t=t, compute=step, plan=0, thread=thread, dur=list(dur), wait=wait))
        t += 1000 * (step + 1)
        events.append(s.StepEnd(t=t, step=step, status=0, n_ubatch=1, n_reused=0, prepare=0,
            readback=0))  # fmt: skip
    return events


@pytest.fixture(scope="module")
def recorded() -> Session:
    return load_session(RECORDED)


@pytest.fixture(scope="module")
def tables() -> Tables:
    return load_tables(RECORDED)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return session_of(tmp_path / "session.log", by_hand())


def test_by_op_by_hand(session):
    report, _ = compute_stats(session, "op")
    # both took 600 ns in three steps; MUL_MAT: 2 * 4 * 8 flops and 64 + 16 + 32 bytes each
    matmul, add = sorted(report.rows, reverse=True)
    quantiles = [200.0, 280.0, 298.0]
    rates = [3 * 64 / 600e-9, 64 / 200e-9, 3 * 112 / 600e-9, 112 / 200e-9]
    assert matmul[:5] == ["MUL_MAT f16", 3, 600, 0.5, 200.0]
    assert matmul[5:] == pytest.approx([*quantiles, *rates, 0])
    figures = [*quantiles, 4e7, 4e7, 4e8, 4e8, 60]
    assert add == ["ADD", 3, 600, 0.5, 200.0, *map(pytest.approx, figures)]
    assert "Left out: 1 step of warm-up runs." in report.notes


def test_warm_up_is_counted_when_asked(session):
    report, _ = compute_stats(session, "op", warm_up=True)
    assert column(report, "total") == [9600, 9600]
    assert not any("warm-up" in note for note in report.notes)


@pytest.mark.parametrize(
    ("by", "rows"),
    [
        ("layer", [[0, 3, 600], [1, 3, 600]]),
        ("tensor", [["blk.0.attn_q.weight", 3, 600], ["(no weight)", 3, 600]]),
        ("type", [["f16", 3, 600], ["(no weight)", 3, 600]]),
        # a step is as long as its caller waited
        ("phase", [["prefill", 1, 2000], ["decode", 2, 7000]]),
    ],
)
def test_other_keys_by_hand(session, by, rows):
    assert [row[:3] for row in compute_stats(session, by)[0].rows] == rows


def test_the_rates_of_steps_by_hand(session):
    """The matrix product has 2 * 4 * 8 operations and 64 + 16 + 32 bytes, the sum 8 and 3 * 32; a
    step does both."""
    flops, n_bytes = 64 + 8, 112 + 80
    prefill, decode = (row[5:] for row in compute_stats(session, "phase")[0].rows)
    rates = [flops / 2000e-9] * 2 + [n_bytes / 2000e-9] * 2
    assert prefill == pytest.approx([2000, 2000, 2000, *rates, None])
    middle = (1 / 3000e-9 + 1 / 4000e-9) / 2
    rates = [2 * flops / 7000e-9, flops * middle, 2 * n_bytes / 7000e-9, n_bytes * middle]
    assert decode == pytest.approx([3500, 3900, 3990, *rates, None])


def test_the_waits_and_rates_of_a_layer_by_hand(session):
    """One kernel of each layer in a step: both waited 20 ns at its second kernel."""
    for row, flops, n_bytes in zip(
        compute_stats(session, "layer")[0].rows, (64, 8), (112, 80), strict=True
    ):
        assert row[8] == pytest.approx(3 * flops / 600e-9)
        assert row[10] == pytest.approx(3 * n_bytes / 600e-9)
        assert row[12] == (0 if row[0] == 0 else 3 * 20)


def test_two_keys_of_steps_in_the_order_that_is_asked_for(session):
    rows = [row[:3] for row in compute_stats(session, "context,phase")[0].rows]
    assert rows == [[0, "prefill", 1], [0, "decode", 2]]
    rows = [row[:3] for row in compute_stats(session, "phase,context")[0].rows]
    assert rows == [["prefill", 0, 1], ["decode", 0, 2]]


def test_steps_with_work_that_is_not_known(tmp_path):
    """A mask of two sequences that share cells hides an unknown part: an upper bound. Kernels of a
    device have no work in the log, so a phase with one has no rates."""
    for device in (False, True):
        events = make_log(Random(3).randint, 1, "detailed")
        for event in events:
            if isinstance(event, s.StepBegin):
                event.seq = event.seq_pos = event.seq_tokens = None
        if device:
            events = with_devices(events, Random(1), timed=False)
        report = compute_stats(session_of(tmp_path / f"{device}.log", events), "phase")[0]
        for row in report.rows:
            assert row[8] is None if device else isinstance(row[8], AtMost)
            assert row[10] is None if device else isinstance(row[10], AtMost)
        assert (BOUND in report.notes) is not device


def test_the_slowest_come_first_and_layers_in_order(recorded):
    for by in ("op", "tensor", "type", "role"):
        totals = column(compute_stats(recorded, by)[0], "total")
        assert all(a >= b for a, b in pairwise(totals)), by
    layers = column(compute_stats(recorded, "layer")[0], "layer")
    assert layers == [-1, 0, 1, 2, 3]


def test_threads_and_their_imbalance_by_hand(session):
    (report,) = compute_stats(session, "thread")
    # 1,200 ns each; thread 0 waits 3 * 20 of them, thread 1 3 * 30
    assert report.rows == [
        [0, 6, 1140, 60, pytest.approx(60 / 1200)],
        [1, 6, 1110, 90, pytest.approx(90 / 1200)],
    ]
    # in every compute thread 0 works 10 ns longer than thread 1, 5 more than the mean
    assert f"Imbalance {1140 / 1125:.3f}" in report.notes[1]
    assert "15.0 ns longer" in report.notes[1]


# --- against the log ---


@given(events=logs() | unclosed_logs())
@settings(max_examples=10)
def test_the_totals_are_those_of_the_ops_that_count(events, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("log") / "session.log", events)
    session, tables = load_session(path), load_tables(path)
    counted = tables.ops[tables.ops.step.isin(tables.steps.step) & (tables.ops.thread == 0)]
    for by in OF_OPS if session.start.level != "minimal" else ():
        report = compute_stats(session, by)[0]
        assert sum(column(report, "total")) == counted.dur.sum()
        if len(counted) and counted.dur.sum():
            assert sum(column(report, "share")) == pytest.approx(1)
    by_phase = compute_stats(session, "phase")[0]
    assert sum(column(by_phase, "total")) == tables.steps.dur.sum()


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_figure_is_that_of_pandas(recorded, tables, phase):
    ops = tables.ops
    ops = ops[(ops.thread == 0) & (ops.phase == phase)]
    keys = {"op": ops.label, "tensor": ops.weight, "type": ops.weight_type}
    for by, key in keys.items():
        report = compute_stats(recorded, by, phase)[0]
        assert sum(column(report, "count")) == len(ops)
        for name, count, total, share, mean, *figures in report.rows:
            of = ops[key.isna() if name == "(no weight)" else key == name]
            assert (count, total) == (len(of), of.dur.sum())
            assert share == pytest.approx(of.dur.sum() / ops.dur.sum())
            assert mean == pytest.approx(of.dur.mean())
            assert figures[:3] == pytest.approx(of.dur.quantile([0.5, 0.9, 0.99]).tolist())
            rates = [
                of.flops.sum() / total * 1e9 or None,
                of.gflop_per_s.median() * 1e9 if of.flops.any() else None,
                of.bytes.sum() / total * 1e9 or None,
                of.gb_per_s.median() * 1e9,
            ]
            assert figures[3:] == [*map(pytest.approx, rates), of.wait.sum()]
    for by in ("layer", "block"):
        report = compute_stats(recorded, by, phase)[0]
        per_compute = ops.groupby(["compute", by], observed=True).dur.sum().reset_index()
        for name, count, total, _, _, median, *_ in report.rows:
            of = per_compute[per_compute[by] == name].dur
            assert (count, total, median) == (len(of), of.sum(), of.median())


PAIRS = {
    "layer,op": ["layer", "label"], "type,phase": ["weight_type", "phase"],
    "role,layer": ["role", "layer"], "role": ["role"], "context,tensor": ["ctx", "weight"],
}  # fmt: skip


@pytest.mark.parametrize("by", PAIRS)
def test_two_keys_are_those_of_pandas(recorded, tables, by):
    ops = tables.ops[tables.ops.thread == 0].copy()
    ops["role"] = ops.weight.astype("string").str.replace(r"^blk\.\d+\.|\.weight$", "", regex=True)
    wanted = ops.groupby(PAIRS[by], observed=True).dur.agg(["count", "sum"])
    n = by.count(",") + 1
    report = compute_stats(recorded, by)[0]
    rows = {tuple(row[:n]): row[n : n + 2] for row in report.rows}
    for name, figures in zip(wanted.index, wanted.to_numpy().tolist(), strict=True):
        assert rows.pop(name if n > 1 else (name,)) == figures
    # what reads no weight has a role in words, and no tensor or type
    rest = sum(figures[1] for figures in rows.values())
    assert rest == ops.dur.sum() - wanted["sum"].sum()
    assert all("(no weight)" in key or "role" in by for key in rows)


def test_filters_keep_what_pandas_keeps(recorded, tables):
    ops, steps = tables.ops[tables.ops.thread == 0], tables.steps
    down = ops.weight.astype("string").str.contains("ffn_down").fillna(False)
    cases = [
        ([layer_filter(1, 2)], ops.layer.between(1, 2)),
        ([op_filter("rope,mul")], ops.op.astype(str).str.contains(r"\bROPE\b|\bMUL\b")),
        ([where_filter("tensor=*ffn_down*")], down),
        # the result of flash attention has this name as a view; that of the product is ffn_out
        ([where_filter("tensor=kqv*")], ops.op == "FLASH_ATTN_EXT"),
        ([where_filter("tensor=ffn_out-?")], down),
        ([where_filter("role=ffn_down"), where_filter("phase=decode")],
         down & (ops.phase == "decode")),
    ]  # fmt: skip
    for filters, kept in cases:
        assert kept.any()
        for by in ("op", "layer", "context,layer", "phase"):
            (report,) = compute_stats(recorded, by, filters=filters)
            assert sum(column(report, "total")) == ops[kept].dur.sum()
            assert sum(column(report, "share")) == pytest.approx(1)
    (report,) = compute_stats(recorded, "context", filters=[where_filter("phase=prefill")])
    assert column(report, "total") == [steps[steps.phase == "prefill"].dur.sum()]
    with pytest.raises(UsageError, match="the filters leave nothing"):
        compute_stats(recorded, "op", filters=[where_filter("op=NONE")])
    for wrong in ("colour=red", "op", "thread=0"):
        with pytest.raises(UsageError, match="give COLUMN=PATTERN"):
            where_filter(wrong)
    for wrong in ("op,op", "thread,op", "op,layer,type", "colour", ""):
        with pytest.raises(UsageError, match=f"--by {wrong}:"):
            parse_by(wrong)


def test_imbalance_is_that_of_pandas(recorded, tables):
    ops = tables.ops.assign(busy=tables.ops.dur - tables.ops.wait)
    busy = ops.groupby(["compute", "thread"]).busy.sum().unstack()
    (report,) = compute_stats(recorded, "thread")
    assert column(report, "busy") == busy.sum().tolist()
    expected = busy.max(axis=1).sum() / busy.mean(axis=1).sum()
    assert any(f"Imbalance {expected:.3f}" in note for note in report.notes)


# --- levels, ends, wrong input ---


@pytest.mark.parametrize("by", BYS)
@pytest.mark.parametrize("level", s.LEVELS)
def test_a_level_answers_what_it_can(by, level, tmp_path):
    made = make_log(Random(3).randint, 1, level)
    if by == "expert":
        start, *rest = experts_log.events()
        made = [replace(start, level=level), *rest]
    session = session_of(tmp_path / "session.log", made)
    can = level == "verbose" or by in ("layer", *OF_STEP)
    can = can or (level != "minimal" and by != "thread")
    if can:
        assert compute_stats(session, by)[0].rows
    else:
        needed = "verbose" if by == "thread" and level == "detailed" else "detailed"
        with pytest.raises(UsageError, match=f"by {by} needs .* --level {needed}"):
            compute_stats(session, by)


def test_at_minimal_layers_are_those_that_were_timed(tmp_path):
    events = make_log(Random(3).randint, 2, "minimal")
    report = compute_stats(session_of(tmp_path / "session.log", events))[0]
    assert report.title == "Computes by layer, all phases"
    total: dict[int, int] = defaultdict(int)
    for event in events:
        if isinstance(event, s.Layers):
            event.layer, event.dur, event.gap = event.layer * 2, event.dur * 2, None  # once more
            for layer, ns in zip(event.layer, event.dur, strict=True):
                total[layer] += ns
    report = compute_stats(session_of(tmp_path / "twice.log", events))[0]
    assert [row[0] for row in report.rows] == sorted(total)
    assert column(report, "total") == [total[layer] for layer in sorted(total)]
    assert "FLOP/s" not in render_text([report])


@given(events=unclosed_logs())
@settings(max_examples=10)
def test_any_log_has_statistics_of_at_most_80_columns(events, tmp_path_factory):
    session = session_of(tmp_path_factory.mktemp("log") / "session.log", events)
    for by in ("layer", "phase"):
        for line in render_text(compute_stats(session, by)).splitlines():
            assert len(line) <= 80
    assert "The log was not closed." in compute_stats(session)[0].notes


@pytest.mark.parametrize("name", ["flat-event.log", "flat-type.log"])
def test_old_dialects_have_statistics(name):
    (report,) = compute_stats(load_session(FIXTURES / "dialects" / name), "phase")
    assert len(report.rows) == 1
    assert "Converted from an earlier fork's log: it measured times differently." in report.notes


def test_the_command_has_five_forms(recorded):
    blocks = ("stats", RECORDED, "--by", "block")
    total = column(compute_stats(recorded, "block")[0], "total")
    assert printed(*blocks).startswith("Computes by block, all phases\n")
    assert [row["total"] for row in json_reports(*blocks)[0]["rows"]] == total
    lines = printed(*blocks, "--csv").splitlines()
    assert lines[0].startswith("block,count,total (ns),share,mean (ns)")
    assert [int(line.split(",")[2]) for line in lines[1:]] == total
    assert "| feed-forward | 24 |" in printed(*blocks, "--md")
    assert printed(*blocks, "--html").startswith("<!doctype html>")
    chosen = ("--layers", "1-2", "--ops", "MUL_MAT", "--where", "phase=decode", "--sort", "p99")
    wanted = ("stats", RECORDED, "--by", "layer,op", *chosen, "--top", "3", "--csv")
    (head, *rows) = printed(*wanted).splitlines()
    assert head.startswith("layer,op,count")
    assert {row.partition(" ")[0] for row in rows} == {"1,MUL_MAT", "2,MUL_MAT"}


def test_wrong_input_is_one_line(instr: Instr):
    assert_refused(instr("stats", RECORDED, "--phase", "encode"), "no encode step to count")
    assert_refused(instr("stats", "no.log"), "no.log: no such file")
    assert_refused(instr("stats", RECORDED, "--by", "colour"), "colour")


def test_the_rows_that_are_wanted(recorded):
    report = compute_stats(recorded, "tensor")[0]
    first = arrange(report, "p99", 3)
    assert column(first, "p99") == sorted(column(report, "p99"), reverse=True)[:3]
    assert f"Not shown: {len(report.rows) - 3} more rows (--top 3)." in first.notes
    assert column(arrange(report, "tensor"), "tensor") == sorted(column(report, "tensor"))
    rates = column(arrange(report, "FLOP/s"), "FLOP/s")
    assert rates[0] == max(rate for rate in rates if rate is not None)
    with pytest.raises(UsageError, match="--sort colour: the columns are tensor, count"):
        arrange(report, "colour")
