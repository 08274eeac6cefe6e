"""The values that `--stats` read: several computes together are numpy's figures of all elements."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.values import (
    MOST_TEXT,
    Computed,
    Piece,
    Read,
    Spread,
    compare_values,
    compute_values,
    map_shifts,
    map_values,
    name_of,
    same_tokens,
    shift_of,
    values_of,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session
from llamacpp_instr.report.charts import Chart
from tests.kit.figures import drawn
from tests.kit.made_log import make_log
from tests.kit.reports import rows, session_of

ELEMENTS = st.lists(
    st.floats(-1e6, 1e6, width=32) | st.sampled_from([np.nan, np.inf, -np.inf, 0.0]), max_size=12
)


def read(values: np.ndarray, compute: int = 0, graph: int = 0, node: int = 0) -> s.TensorStats:
    """What the recorder writes about these values."""
    finite = values[np.isfinite(values)].astype(np.float64)
    of = (
        {"min": finite.min(), "max": finite.max(), "mean": finite.mean(), "std": finite.std()}
        if len(finite)
        else {}
    )
    return s.TensorStats(
        t=10**13, compute=compute, graph=graph, node=node, name="Qcur-0", layer=0, n=len(values),
        nan=int(np.isnan(values).sum()), inf=int(np.isinf(values).sum()),
        zero=int((values == 0).sum()), hist=[], **{name: float(v) for name, v in of.items()},
    )  # fmt: skip


@given(pieces=st.lists(ELEMENTS, min_size=1, max_size=5))
@settings(max_examples=100)
def test_pieces_together_are_numpys_figures_of_the_whole(pieces: list[list[float]]) -> None:
    arrays = [np.array(piece, np.float64) for piece in pieces]
    whole = np.concatenate(arrays)
    finite = whole[np.isfinite(whole)]
    of = Spread([read(array) for array in arrays])
    assert (of.n, of.nan, of.inf) == (len(whole), np.isnan(whole).sum(), np.isinf(whole).sum())
    assert of.zero == (whole == 0).sum()
    if not len(finite):
        assert (of.min, of.max, of.mean, of.std) == (None,) * 4
        return
    assert (of.min, of.max) == (finite.min(), finite.max())
    assert of.mean == pytest.approx(finite.mean(), abs=1e-6)
    assert of.std == pytest.approx(finite.std(), abs=1e-5, rel=1e-9)


def with_values(path: Path, scale: float, name: str = "Qcur", change: int = -1) -> Session:
    """A session whose Qcur was read in every layer and compute, with values of this scale. The
    token of the index `change` has an id other than the default."""
    random = np.random.default_rng(1)
    events: list[s.Event] = []
    graphs: dict[int, s.Graph] = {}
    for event in make_log(lambda _low, high: high, 1, "detailed"):
        events.append(event)
        if isinstance(event, s.Token):
            event.text = f"{event.index}"
            event.id += event.index == change
        if isinstance(event, s.Graph):
            graphs[event.graph] = event
        if not isinstance(event, s.Compute):
            continue
        nodes = graphs[event.graph].nodes
        assert nodes is not None
        for node, (of, op) in enumerate(zip(nodes.name, nodes.op, strict=True)):
            if of.startswith("Qcur-") and op == "MUL_MAT":
                layer = nodes.layer[node]
                values_read = read(
                    random.normal(1.0, scale * (layer + 1), 64), event.compute, event.graph, node
                )
                events.append(replace(values_read, name=f"{name}-{layer}", layer=layer))
    return session_of(path, events)


def test_a_row_for_each_tensor_op_and_layer(tmp_path: Path) -> None:
    session = with_values(tmp_path / "a.log", 2.0)
    report = compute_values(session)
    assert report.title == "Values: all that were read are finite"
    n = len(session.computes)
    assert [row[:5] for row in report.rows] == [["Qcur", "MUL_MAT", k, n, 64 * n] for k in range(3)]
    session.stats[1].nan, session.stats[2].inf = 3, 1
    (step, *_) = session.computes["step"]
    assert compute_values(session).title == (
        f"Values: 3 NaN and 1 infinite, first in Qcur-1, step {step}"
    )
    session.computes["step"][:] = 0
    assert compute_values(session).title.endswith("first in Qcur-1, step 0")
    session.computes["step"][:] = -1
    assert compute_values(session).title.endswith("1 infinite, first in Qcur-1")
    session.stats.clear()
    with pytest.raises(UsageError, match=r"no values were read; record with --stats"):
        compute_values(session)


def test_two_sessions_side_by_side(tmp_path: Path) -> None:
    a, b = with_values(tmp_path / "a.log", 2.0), with_values(tmp_path / "b.log", 6.0)
    report, _ = compare_values(a, b)
    for row in rows(report):
        # the same random numbers, three times as far from 1
        assert row["std B / A"] == pytest.approx(3)
        assert row["shift"] == pytest.approx((row["mean B"] - row["mean A"]) / row["std A"])
    most = max(rows(report), key=lambda row: abs(row["shift"]))
    assert report.title.endswith(f"in Qcur of layer {most['layer']}")
    same, _ = compare_values(a, a)
    assert all(row[7] == 0 and row[8] == 1 for row in same.rows)
    with pytest.raises(UsageError, match="read no values of the same tensors"):
        compare_values(a, with_values(tmp_path / "c.log", 1.0, "Kcur"))


@pytest.mark.parametrize("change", [-1, 0, 1, 2])
def test_two_sessions_are_compared_as_long_as_their_tokens_are_the_same(
    change: int, tmp_path: Path
) -> None:
    """The prompt is computed in two ubatches, then each token in a step; the token 0 is at 40."""
    a, b = with_values(tmp_path / "a.log", 2.0), with_values(tmp_path / "b.log", 6.0, change=change)
    n = 5 if change < 0 else 2 + change
    by_tensor, by_token = compare_values(a, b)
    labels = ["20 tokens from 0", "20 tokens from 20", "0", "1", "2"][:n]
    positions = ["0-19", "20-39", "40", "41", "42"][:n]
    assert [row[:2] for row in by_token.rows] == [
        list(p) for p in zip(positions, labels, strict=True)
    ]
    parted = f"From position {40 + change} on, the tokens differ: A has “{change}”, B “{change}”."
    assert (parted in by_tensor.notes) == (change >= 0)
    assert f"{n} computes of the same tokens: A has 5 in all, B 5." in by_tensor.notes

    def means(session: Session) -> np.ndarray:
        """By compute and layer."""
        return np.array([event.mean for event in session.stats]).reshape(5, 3)[:n]

    std = np.array([event.std for event in a.stats]).reshape(5, 3)[:n]
    shifts = (means(b) - means(a)) / std
    most = np.abs(shifts).argmax(axis=1)
    assert [row[2] for row in by_token.rows] == pytest.approx(shifts[range(n), most].tolist())
    assert [row[5] for row in by_token.rows] == most.tolist()
    assert [row[6] for row in by_token.rows] == pytest.approx([3] * n)
    assert [row[3] for row in by_tensor.rows] == pytest.approx(means(a).mean(axis=0).tolist())
    (chart,) = map_shifts(a, b)
    assert cells_of(chart)[0] == pytest.approx(np.abs(shifts).T)


def test_other_prompts_are_not_compared_by_token(tmp_path: Path) -> None:
    a, b = with_values(tmp_path / "a.log", 2.0), with_values(tmp_path / "b.log", 6.0)
    (report, _), b.sequences["tokens"][0] = compare_values(a, b), 39
    (all_computes,) = compare_values(a, b)
    assert all_computes.rows == report.rows
    assert "The prompts differ: A has 40 tokens from 0, B 39 from 0." in all_computes.notes
    assert map_shifts(a, b) == []


@given(seed=st.integers(0, 2**32), n_contexts=st.integers(1, 3), change=st.integers(0, 12))
@settings(max_examples=30)
def test_computes_are_paired_until_a_token_differs(
    seed: int, n_contexts: int, change: int, tmp_path: Path
) -> None:
    """This ends the pairs of its context; the other contexts go on."""
    events = make_log(Random(seed).randint, n_contexts)
    tokens = [event for event in events if isinstance(event, s.Token)]
    computes = [event for event in events if isinstance(event, s.Compute)]
    a = session_of(tmp_path / "a.log", events)
    changed = tokens[change] if change < len(tokens) else None
    if changed is not None:
        changed.id += 1
    b = session_of(tmp_path / "b.log", events)
    # the step of the token is still the same; those after it computed another token
    wanted = [
        event.compute
        for event in computes
        if changed is None or event.ctx != changed.ctx or event.step <= changed.step
    ]
    assert same_tokens(a, b).pairs == dict(zip(wanted, wanted, strict=True))


def cells_of(chart: Chart) -> tuple[np.ndarray, list[str]]:
    """The cells of a map as (layer, column), and the labels of its columns."""
    axes = drawn(chart).axes[0]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    return np.asarray(axes.images[0].get_array()), labels


def test_a_map_has_a_cell_for_each_layer_and_token(tmp_path: Path) -> None:
    session = with_values(tmp_path / "a.log", 2.0)
    (chart,) = map_values(session)
    assert chart.title == "Qcur (MUL_MAT): standard deviation"
    cells, labels = cells_of(chart)
    wanted = [[e.std for e in session.stats if e.layer == layer] for layer in range(3)]
    assert cells.tolist() == wanted
    assert labels == ["20 tokens from 0", "20 tokens from 20", "0", "1", "2"]


@pytest.mark.parametrize(
    ("pieces", "label", "where"),
    [
        ([], "1,500 tokens", ""),
        ([Piece(0, -1, 1, -1, "")], "1 token", ""),
        ([Piece(0, 0, 1, -1, "")], "1 token from 0", "0"),
        ([Piece(0, 7, 3, -1, "")], "3 tokens from 7", "7-9"),
        ([Piece(0, 0, 2, -1, "")], "2 tokens from 0", "0-1"),
        ([Piece(0, 7, 1, 5, "x" * 99)], "x" * MOST_TEXT, "7"),
        ([Piece(0, 7, 1, 5, "x"), Piece(1, 8, 1, 5, "y")], "1,500 tokens of 2 sequences", ""),
    ],
)
def test_a_compute_is_named_by_its_tokens(pieces: list[Piece], label: str, where: str) -> None:
    found = Computed(1500, tuple(pieces))
    assert (found.label, found.where) == (label, where)


def test_a_shift_is_counted_in_deviations() -> None:
    """Without a mean or a deviation there is none; nor in a tensor of equal values."""

    def stats(mean: float | None, std: float | None) -> s.TensorStats:
        return s.TensorStats(
            t=0, compute=0, graph=0, node=0, name="x", layer=0, n=4, min=None, max=None, mean=mean,
            std=std, nan=0, inf=0, zero=0, hist=[],
        )  # fmt: skip

    one = stats(2.0, 4.0)
    assert shift_of(one, stats(1.0, None)) == -0.25
    assert shift_of(one, stats(None, 1.0)) is None
    assert shift_of(stats(None, 1.0), one) is None
    assert shift_of(stats(2.0, 0.0), one) is None
    assert shift_of(stats(2.0, 0.0), stats(5.0, 0.0)) is None
    assert shift_of(stats(2.0, None), stats(5.0, 0.0)) is None


def test_without_deviations_the_ratio_is_unknown(tmp_path: Path) -> None:
    a, b = with_values(tmp_path / "a.log", 2.0), with_values(tmp_path / "b.log", 6.0)
    for of, std in ((a, 0.0), (b, None)):
        for event in of.stats:
            event.std = std
    by_tensor, by_token = compare_values(a, b)
    at = [column.name for column in by_tensor.columns].index("std B / A")
    assert {row[at] for row in by_tensor.rows} == {None}
    assert {row[-1] for row in by_token.rows} == {None}
    assert "largest shift" not in by_tensor.figures


def test_a_name_that_is_read_again_in_a_layer_has_a_number(tmp_path: Path) -> None:
    session = with_values(tmp_path / "a.log", 2.0)
    first = session.stats[0]
    session.stats[:] = [first, first, first]
    reads = list(values_of(session))
    assert [read.place for read in reads] == [0, 1, 2]
    assert [name_of(read)[0] for read in reads] == ["Qcur", "Qcur #2", "Qcur #3"]
    assert name_of(Read("Qcur", "MUL_MAT", 7, 1)) == ["Qcur #2", "MUL_MAT", 7]


def test_a_tensor_without_elements_has_no_share_of_zeros(tmp_path: Path) -> None:
    session = with_values(tmp_path / "a.log", 2.0)
    session.stats[:] = [replace(session.stats[0], n=n, zero=n // 2) for n in (0, 1, 4)]
    for event, (n, share) in zip(session.stats, ((0, None), (1, 0), (4, 0.5)), strict=True):
        of_one = session.stats[:]
        session.stats[:] = [event]
        (row,) = compute_values(session).rows
        assert (row[4], row[-1]) == (n, share)
        session.stats[:] = of_one
