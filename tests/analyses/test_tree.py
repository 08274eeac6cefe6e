"""The tree of a session: its leaves add up to what summary and stats show, in every form."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings

from llamacpp_instr.converters.analyses.stats import compute_stats
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.converters.analyses.tree import LEVELS, Measure, build_tree
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.report.render import render_text
from llamacpp_instr.report.tree import (
    Node,
    Tree,
    leaves,
    outline,
    render_folded,
    render_speedscope,
)
from tests.conftest import Instr, assert_refused
from tests.kit.computes import one_by_one
from tests.kit.in_process import printed
from tests.kit.made_log import make_log
from tests.kit.reports import Row, rows, session_of
from tests.kit.strategies import logs

RECORDED = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"
HOSTILE = Tree(
    Node("a b;c", children=[Node("\x1b[31m"), Node("<script>\n", 3), Node("└─", 4)]),
    "time",
    "ns",
    LEVELS,
)


@pytest.fixture(scope="module")
def session() -> Session:
    return load_session(RECORDED)


def summed(found: list[Row], key: Callable[[Any], Any], of: str) -> dict[Any, int]:
    sums: dict[Any, int] = defaultdict(int)
    for row in found:
        sums[key(row)] += row[of]
    return dict(sums)


def check_sums(session: Session) -> None:
    """The tree by time has the rows of `summary` and the totals of `stats`."""
    tree = build_tree(session)
    parts = rows(leaves(tree))
    sections = {report.title: rows(report) for report in compute_summary(session)}
    speed = {row["Phase"]: row["time"] for row in sections.get("Speed", [])}
    assert summed(parts, lambda row: row["phase"], "time").items() >= {
        (phase, ns) for phase, ns in speed.items() if ns
    }
    assert tree.root.amount == sum(speed.values())
    if not session.ops:
        return
    kernels = [row for row in parts if row["op"]]
    for phase in speed:
        of_phase = [row for row in parts if row["phase"] == phase]
        spent = summed(of_phase, lambda row: row["block"] or row["layer"], "time")
        shown = {row["Block"]: row[phase] for row in sections.get("Where the time went", [])}
        assert {name: ns for name, ns in shown.items() if ns} == {
            name: ns for name, ns in spent.items() if ns
        }
    layer = summed(kernels, lambda row: row["layer"], "time")
    for row in rows(compute_stats(session, "layer")[0]):
        name = "outside of layers" if row["layer"] < 0 else f"layer {row['layer']}"
        assert layer[name] == row["total"]


@given(logs())
@settings(max_examples=15)
def test_the_leaves_add_up_to_summary_and_stats(tmp_path_factory, events):
    check_sums(session_of(tmp_path_factory.getbasetemp() / "tree.log", events))


def test_a_recording_has_the_time_and_the_work_of_each_op(session):
    check_sums(session)
    ops = {row["op"]: row for row in rows(compute_stats(session, "op")[0])}

    def op_of(row: Row) -> str:
        """As `stats` calls it: without the role of the weight."""
        return next(op for op in sorted(ops, reverse=True) if f"{row['op']} ".startswith(f"{op} "))

    kernels = [row for row in rows(leaves(build_tree(session))) if row["op"]]
    assert summed(kernels, op_of, "time") == {op: row["total"] for op, row in ops.items()}
    for by, amount, rate in (("bytes", "bytes", "bytes/s"), ("flops", "FLOPs", "FLOP/s")):
        work = summed(rows(leaves(build_tree(session, by))), op_of, amount)
        expected = {op: (row[rate] or 0) * row["total"] / 1e9 for op, row in ops.items()}
        assert work == pytest.approx(expected)


@pytest.mark.parametrize("by", ["time", "bytes", "flops"])
def test_the_outline_shows_all_amounts(session: Session, by: Measure) -> None:
    """The rows without further rows below them add up to the whole."""
    tree = build_tree(session, by)
    report = outline(tree)
    depths = [len(row[0]) - len(row[0].lstrip("│├└─ ")) for row in report.rows]
    below = [*depths[1:], 0]
    ends = [
        row[1] for row, at, next_ in zip(report.rows, depths, below, strict=True) if next_ <= at
    ]
    assert sum(ends) == report.rows[0][1] == tree.root.amount
    text = render_text([report])
    assert max(map(len, text.splitlines())) <= 80
    assert "feed-forward" in text
    assert "ffn_down" in text


def test_folded_stacks_hold_every_leaf(session):
    tree = build_tree(session)
    lines = [line.rpartition(" ") for line in render_folded(tree).splitlines()]
    assert [(stack.split(";"), int(n)) for stack, _, n in lines] == [
        (names, amount) for names, amount in tree.stacks() if amount
    ]
    assert render_folded(HOSTILE) == "a b,c;<script>\\n 3\na b,c;└─ 4\n"


@pytest.mark.parametrize("by", ["time", "bytes", "flops"])
def test_a_speedscope_file_follows_the_schema(session: Session, by: Measure) -> None:
    """The rules of speedscope's file-format-spec.ts."""
    tree = build_tree(session, by)
    for shown in (tree, HOSTILE):
        file = json.loads(render_speedscope(shown, "session.log"))
        assert file["$schema"] == "https://www.speedscope.app/file-format-schema.json"
        frames = [frame.pop("name") for frame in file["shared"]["frames"]]
        assert all(isinstance(name, str) and name.isprintable() for name in frames)
        assert not any(file["shared"]["frames"]), "nothing else is known of them"
        (profile,) = file["profiles"]
        assert file["activeProfileIndex"] == 0
        assert profile["type"] == "sampled"
        assert isinstance(profile["name"], str)
        assert profile["unit"] in ("nanoseconds", "bytes", "none")
        assert len(profile["samples"]) == len(profile["weights"]) > 0
        assert all(0 <= at < len(frames) for sample in profile["samples"] for at in sample)
        assert profile["endValue"] - profile["startValue"] == sum(profile["weights"])
        assert sum(profile["weights"]) == shown.root.amount


def test_the_end_of_the_name_chooses_the_form(session, tmp_path):
    for name, begin in (
        ("a.folded", "session;prefill;layer 0;"),
        ("a.speedscope.json", '{"$schema"'),
        ("a.json", "[\n"),
        ("a.csv", "phase,layer,block,op,time (ns),share\n"),
        ("a.txt", "Session by time\n"),
    ):
        out = tmp_path / name
        printed("tree", RECORDED, "-o", out)
        assert out.read_text().startswith(begin)
    folded = printed("tree", RECORDED, "--folded", "--by", "flops")
    assert folded == render_folded(build_tree(session, "flops"))


@pytest.mark.parametrize("level", ["detailed", "verbose"])
@pytest.mark.parametrize("by", ["time", "bytes", "flops"])
def test_every_leaf_is_that_of_the_events(by: Measure, level: s.Level, tmp_path: Path) -> None:
    """Counted from the lines of the log: ns of thread 0, and the work of every kernel."""
    events = make_log(Random(5).randint, 2, level)
    session = session_of(tmp_path / "session.log", events)
    phase = {e.step: e.phase for e in events if isinstance(e, s.StepBegin)}
    step = {e.compute: e.step for e in events if isinstance(e, s.Compute)}
    plans = {e.plan: e for e in events if isinstance(e, s.Plan)}
    graphs = {e.graph: e for e in events if isinstance(e, s.Graph)}
    wanted: dict[tuple[str, int], int] = defaultdict(int)
    for ops in one_by_one(session.ops):
        if ops.thread != 0:
            continue
        plan = plans[ops.plan]
        nodes = graphs[plan.graph].nodes
        assert nodes is not None
        work = session.work(ops.all).total([0])
        amounts = {"time": ops.dur, "bytes": work.bytes, "flops": work.flops}[by].tolist()
        for first, amount in zip(plan.node, amounts, strict=True):
            wanted[phase[step[ops.compute]], nodes.layer[first]] += amount
    found: dict[tuple[str, int], int] = defaultdict(int)
    for row in rows(leaves(build_tree(session, by))):
        if row["op"]:
            layer = -1 if row["layer"] == "outside of layers" else int(row["layer"].split()[1])
            found[row["phase"], layer] += row[{"time": "time", "flops": "FLOPs"}.get(by, by)]
    assert {key: n for key, n in found.items() if n} == {k: n for k, n in wanted.items() if n}


def test_what_steps_do_beside_kernels_is_that_of_the_events(tmp_path: Path) -> None:
    events = make_log(Random(5).randint, 2, "detailed")
    for event in events:
        if isinstance(event, s.StepEnd):
            event.recorder = 7
    # one compute has no ops: they were dropped
    at = next(i for i, event in enumerate(events) if isinstance(event, s.Ops))
    lost = events[at]
    assert isinstance(lost, s.Ops)
    del events[at]
    tree = build_tree(session_of(tmp_path / "session.log", events))
    phase = {e.step: e.phase for e in events if isinstance(e, s.StepBegin)}
    ops = {e.compute: sum(e.dur) for e in events if isinstance(e, s.Ops)}
    wanted: dict[tuple[str, str], int] = defaultdict(int)
    for event in events:
        if isinstance(event, s.StepEnd):
            wanted[phase[event.step], "the recorder"] += 7
        elif isinstance(event, s.Compute):
            of = phase[event.step]
            wanted[of, "KV slots"] += event.apply
            wanted[of, "graph build"] += event.build + event.alloc
            known = event.compute != lost.compute
            wanted[of, "between ops" if known else "compute"] += event.dur - ops.get(
                event.compute, 0
            )
    found = {
        (row["phase"], row["layer"]): row["time"]
        for row in rows(leaves(tree))
        if not row["op"] and row["layer"] != "the rest"
    }
    assert found == {key: ns for key, ns in wanted.items() if ns}
    assert any(name == "compute" for _, name in found)


def test_layers_and_blocks_are_in_order_and_the_rest_is_last(session: Session) -> None:
    tree = build_tree(session)
    assert [node.name for node in tree.root.children] == ["prefill", "decode"]
    for phase in tree.root.children:
        names = [node.name for node in phase.children]
        assert names[:5] == [*(f"layer {i}" for i in range(4)), "outside of layers"]
        assert names[-1] == "the rest"
        for layer in phase.children[:5]:
            blocks = [node.name for node in layer.children]
            order = ["embedding", "attention", "feed-forward", "norm", "kv", "output"]
            assert blocks == [block for block in order if block in blocks]


def test_names_have_the_role_of_the_weight(session: Session) -> None:
    names = {row["op"] for row in rows(leaves(build_tree(session)))}
    assert {"MUL_MAT f16 ffn_down", "FLASH_ATTN_EXT"} <= names, "attention reads no weight"


def test_an_upper_bound_is_named(tmp_path: Path) -> None:
    events = make_log(Random(3).randint, 1, "detailed")
    for event in events:
        if isinstance(event, s.StepBegin):
            event.seq = event.seq_pos = event.seq_tokens = None
    unknown = session_of(tmp_path / "session.log", events)
    for by, in_notes in (("flops", True), ("bytes", True), ("time", False)):
        notes = build_tree(unknown, by).notes  # type: ignore[arg-type]
        assert any("upper bound" in note for note in notes) is in_notes
        assert any("not measured" in note for note in notes) is in_notes


def test_a_log_without_ops_adds_up_the_layers_of_its_computes(tmp_path: Path) -> None:
    events = make_log(Random(3).randint, 1, "minimal")
    total: dict[int, int] = defaultdict(int)
    for event in events:
        if isinstance(event, s.Layers):
            event.layer, event.dur, event.gap = event.layer * 2, event.dur * 2, None
            for layer, ns in zip(event.layer, event.dur, strict=True):
                total[layer] += ns
    found: dict[str, int] = defaultdict(int)
    for phase in build_tree(session_of(tmp_path / "session.log", events)).root.children:
        for node in phase.children:
            found[node.name] += node.amount
    for layer, ns in total.items():
        assert found["outside of layers" if layer < 0 else f"layer {layer}"] == ns


def test_a_log_without_ops_has_times_only(instr: Instr, tmp_path: Path) -> None:
    lines = [
        line.replace('"level":"verbose"', '"level":"minimal"', 1)
        for line in RECORDED.read_text().splitlines(keepends=True)
        if not line.startswith(('{"event":"ops"', '{"event":"plan"'))
    ]
    log = tmp_path / "minimal.log"
    log.write_text("".join(lines))
    done = instr("tree", log)
    assert done.returncode == 0
    assert "between layers" in done.stdout
    assert_refused(instr("tree", log, "--by", "flops"), "by flops needs ops", "--level detailed")


def test_several_logs_follow_each_other_and_an_export_takes_one(
    session: Session, instr: Instr, tmp_path: Path
) -> None:
    begin = session.start.id.encode()
    other = RECORDED.read_bytes().replace(begin, b"0123456789abcdef", 1)
    (tmp_path / "one.log").write_bytes(RECORDED.read_bytes())
    (tmp_path / "other.log").write_bytes(other)
    # short names: a heading is wrapped at 80 columns
    done = instr("tree", "one.log", "other.log")
    assert done.stdout.count("Session by time") == 2
    refused = instr("tree", "one.log", "other.log", "--folded")
    assert_refused(refused, "--folded takes one session")
