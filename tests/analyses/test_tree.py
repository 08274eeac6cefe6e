"""The tree of a session: its leaves add up to what summary and stats show, in every form."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from converters.analyses.stats import compute_stats
from converters.analyses.summary import compute_summary
from converters.analyses.tree import LEVELS, Measure, build_tree
from converters.report.report import render_text
from converters.report.tree import (
    Node,
    Tree,
    leaves,
    outline,
    render_folded,
    render_speedscope,
)
from llamacpp_instr.log.session import Session, load_session
from tests.conftest import Instr, assert_refused
from tests.kit.in_process import printed
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
        told = {row["Block"]: row[phase] for row in sections.get("Where the time went", [])}
        assert {name: ns for name, ns in told.items() if ns} == {
            name: ns for name, ns in spent.items() if ns
        }
    layer = summed(kernels, lambda row: row["layer"], "time")
    for row in rows(compute_stats(session, "layer")[0]):
        name = "outside of layers" if row["layer"] < 0 else f"layer {row['layer']}"
        assert layer[name] == row["total"]


@given(logs())
@settings(max_examples=15, deadline=None)
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
        told = {op: (row[rate] or 0) * row["total"] / 1e9 for op, row in ops.items()}
        assert work == pytest.approx(told)


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
