"""Sections of the page that have their first rows only: what is left out is counted."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from converters.analyses import page
from converters.analyses.stats import compute_stats
from converters.analyses.tree import NO_LAYER, build_tree
from converters.report.page import Figure, Section
from converters.report.report import Report
from llamacpp_instr.log.session import Session, load_session

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
    """There are 18 in four layers; of those that are not drawn, the page has their time."""
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
