"""Sections of the page that show only their first rows: what is left out is counted."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.analyses import page
from llamacpp_instr.converters.analyses.stats import compute_stats
from llamacpp_instr.converters.analyses.tree import LEVELS, NO_LAYER, build_tree
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.report.page import Figure, Section
from llamacpp_instr.report.report import Column, Report
from llamacpp_instr.report.tree import Node, Tree
from tests.kit.batched_log import Batch, batched_log
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch

RECORDED = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"


@pytest.fixture(scope="module")
def session() -> Session:
    return load_session(RECORDED)


def section(session: Session, title: str) -> Section:
    (found,) = (of for of in page.compute_page([session])[1] if of.title == title)
    return found


@pytest.mark.parametrize("most", [5, 17, 18, 19])
def test_the_map_has_the_ops_that_take_longest(
    session: Session, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """There are 18 in four layers; the page has the total time of those that are not drawn."""
    monkeypatch.setattr(page, "MOST_ROWS", most)
    whole: Counter[str] = Counter()
    inside: Counter[str] = Counter()
    for names, amount in build_tree(session).stacks():
        if len(names) == 5:
            whole[names[-1]] += amount
            inside[names[-1]] += amount * (names[2] != NO_LAYER)
    assert len(whole) == 18
    by_time = [op for op, _ in whole.most_common()]
    heat = section(session, "Time by layer and op")
    assert isinstance(heat, Figure)
    names = re.findall(r'<span title="([^"]*)">', heat.markup)
    assert names == by_time[:most]
    rest = 100 * sum(whole[op] for op in by_time[most:]) / whole.total()
    left = {
        5: [f"Not shown: 13 other ops, {rest:.1f} % of the time."],
        17: [f"Not shown: 1 other op, {rest:.1f} % of the time."],
    }
    assert heat.notes[1:] == left.get(most, [])
    columns = re.findall(r"<title>MUL_MAT f16 ffn_up, layer (\w+):", heat.markup)
    assert columns == ["0", "1", "2", "3"]


@pytest.mark.parametrize("most", [5, 38, 39, 40])
def test_the_weights_whose_kernels_take_longest(
    session: Session, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The model has 39."""
    monkeypatch.setattr(page, "MOST_ROWS", most)
    weights = section(session, "The most expensive weights")
    assert isinstance(weights, Report)
    every = compute_stats(session, "tensor")[0].rows
    names = {tensor.name for tensor in session.tensors}
    assert len(names) == 39
    assert weights.rows == [row for row in every if row[0] in names][:most]
    assert weights.notes[1:] == [f"{most} of 39 rows; stats --by tensor has all."] * (most < 39)


def test_the_tiles_have_the_first_figures(session: Session) -> None:
    """By the clock, then by phase, decode first, then the memory."""
    tiles = page.compute_page([session])[1][0]
    assert isinstance(tiles, Figure)
    words = re.sub(r"<[^>]*>", "\n", tiles.markup).split("\n")
    labels = [word for word in words if re.search("[a-z]{4}", word)]
    assert [label.split(",")[-2 if "median" in label else 0].strip() for label in labels] == [
        "tokens/s by the clock", "to the first token", "between tokens", "decode", "prefill",
        "resident",
    ]  # fmt: skip


def test_a_session_without_kernels_has_no_maps(tmp_path: Path) -> None:
    """The tree then has the time of the computes."""
    session = session_of(tmp_path / "a.log", batched_log([Batch([(0, 0, 4)])]))
    titles = [of.title for of in page.compute_page([session])[1]]
    assert "Time by layer and op" not in titles
    assert "Session, phase, layer, block, op" in titles


@pytest.mark.parametrize(("ns", "drawn"), [(0, False), (1, True)])
def test_a_tree_without_time_is_not_drawn(
    ns: int, drawn: bool, monkeypatch: pytest.MonkeyPatch, session: Session
) -> None:
    tree = Tree(Node("session", children=[Node("decode", ns)]), "time", "ns", LEVELS)
    monkeypatch.setattr(page, "build_tree", lambda *_: tree)
    titles = [of.title for of in page._trees(session)]
    assert titles == ["Session, phase, layer, block, op"] * drawn


def test_the_map_adds_up_blocks_and_phases_and_orders_layers_by_number() -> None:
    def layer(name: str, *ops: tuple[str, int]) -> Node:
        blocks = [Node(f"block {i}", children=[Node(*op)]) for i, op in enumerate(ops)]
        return Node(name, children=blocks)

    phases = [
        Node("prefill", children=[layer("layer 10", ("ADD", 10), ("ADD", 20))]),
        Node("decode", children=[layer("layer 9", ("ADD", 3)), layer("layer 10", ("ADD", 7)),
            layer("layer 2", ("MUL", 1), ("ADD", 0)), layer(NO_LAYER, ("MUL", 59))]),
    ]  # fmt: skip
    tree = Tree(Node("session", children=phases), "time", "ns", LEVELS)
    (heat,) = page._heat(tree)
    assert isinstance(heat, Figure)
    cells = re.findall(r"<title>(\w+), layer (\w+): ([^<]*)</title>", heat.markup)
    assert [(op, layer, value.partition(", ")[2]) for op, layer, value in cells] == [
        ("MUL", "2", "1.0 %"), ("MUL", "none", "59.0 %"),
        ("ADD", "9", "3.0 %"), ("ADD", "10", "37.0 %"),
    ]  # fmt: skip
    assert list(page._heat(Tree(Node("session", 5), "time", "ns", LEVELS))) == []


@pytest.mark.parametrize(
    ("name", "title"), [("", "model.gguf, a.log"), ("Tiny Llama", "Tiny Llama, a.log")]
)
def test_the_title_has_the_name_of_the_model_or_its_file(
    name: str, title: str, tmp_path: Path
) -> None:
    events = batched_log([Batch([(0, 0, 4)])])
    for event in events:
        if isinstance(event, s.Model):
            event.name, event.path = name, "/a/b/model.gguf"
    assert page.compute_page([session_of(tmp_path / "a.log", events)])[0] == title


@pytest.mark.parametrize(("part", "suffix"), [(1, ""), (2, ", part 2"), (3, ", part 3")])
def test_what_recorded_is_identified(part: int, suffix: str, tmp_path: Path) -> None:
    events = batched_log([Batch([(0, 0, 4)])])
    start = events[0]
    assert isinstance(start, s.SessionStart)
    events[0] = replace(start, part=part)
    found = section(session_of(tmp_path / "a.log", events), "Identity, machine and settings")
    assert isinstance(found, Report)
    facts = {row[0]: row[1] for row in found.rows}
    assert facts["session"] == start.id + suffix
    assert facts["recorded"] == "2025-06-01T12:00:00.000Z"
    assert facts["process"] == "42: python app.py"
    assert facts["memory of the machine"] == "8.00 GiB"
    assert facts["file"] == "model.gguf"
    assert all(facts.values())
    assert not found.headed


@pytest.mark.parametrize(("n", "shown"), [(1, False), (2, True), (3, True)])
def test_requests_are_shown_if_there_are_several(n: int, shown: bool, tmp_path: Path) -> None:
    batch = Batch([(seq, 0, 4) for seq in range(n)], sampled=[(seq, 1, "a") for seq in range(n)])
    session = session_of(tmp_path / "a.log", batched_log([batch]))
    titles = [of.title for of in page.compute_page([session])[1]]
    assert ("Latency of requests" in titles) == shown


def test_the_first_figures_of_a_session_are_those_that_it_has() -> None:
    columns = [Column("phase"), Column("steps", "count"), Column("tokens/s median", "per_second")]
    speed = Report(
        "Speed", columns, [["prefill", 1, 80.0], ["decode", 2, 20.0], ["encode", 0, None]]
    )
    clock = Report("Time by the clock", [], [], figures={
        "tokens/s": (9.0, "per_second"), "between tokens, median": (0, "ns"),
    })  # fmt: skip
    memory = Report("Memory", [], [], figures={"resident": (5, "bytes")})
    summary = {"Speed": speed, "Time by the clock": clock}
    assert list(page._first_figures(summary, memory)) == [
        ("tokens/s by the clock", 9.0, "per_second"),
        ("between tokens", 0, "ns"),
        ("tokens/s, decode, median step", 20.0, "per_second"),
        ("tokens/s, prefill, median step", 80.0, "per_second"),
        ("resident, most", 5, "bytes"),
    ]
    assert list(page._first_figures({}, None)) == []
    nothing = {"Speed": Report("Speed", columns, [])}
    assert list(page._first_figures(nothing, Report("Memory", [], []))) == []


def test_a_session_without_figures_has_no_tiles(tmp_path: Path) -> None:
    session = session_of(tmp_path / "a.log", Sketch().events)
    assert "" not in [of.title for of in page.compute_page([session])[1]]


def test_sessions_side_by_side_have_the_figures_of_all() -> None:
    """A figure that a session lacks is an empty cell of its row."""
    first = [("speed", 3.0, "per_second"), ("resident", 7, "bytes")]
    second = [("resident", 9, "bytes"), ("between", 2, "ns")]
    report = page._side_by_side(["a", "b"], [first, second])
    assert report.columns == [
        Column("session"), Column("speed", "per_second"), Column("resident", "bytes"),
        Column("between", "ns"),
    ]  # fmt: skip
    assert report.rows == [["a", 3.0, 7, None], ["b", None, 9, 2]]
