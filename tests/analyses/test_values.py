"""The values that `--stats` read: several computes together are numpy's figures of all elements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from converters.analyses.value_maps import chart_values
from converters.analyses.values import compare_values, compute_values, joined
from converters.report import charts
from llamacpp_instr import schema as s
from llamacpp_instr.errors import UsageError
from llamacpp_instr.log.session import Session, load_session
from tests.kit.made_log import encode, make_log

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
@settings(max_examples=100, deadline=None)
def test_pieces_together_are_numpys_figures_of_the_whole(pieces: list[list[float]]) -> None:
    arrays = [np.array(piece, np.float64) for piece in pieces]
    whole = np.concatenate(arrays)
    finite = whole[np.isfinite(whole)]
    of = joined([read(array) for array in arrays])
    assert (of.n, of.nan, of.inf) == (len(whole), np.isnan(whole).sum(), np.isinf(whole).sum())
    assert of.zero == (whole == 0).sum()
    if not len(finite):
        assert (of.min, of.max, of.mean, of.std) == (None,) * 4
        return
    assert (of.min, of.max) == (finite.min(), finite.max())
    assert of.mean == pytest.approx(finite.mean(), abs=1e-6)
    assert of.std == pytest.approx(finite.std(), abs=1e-5, rel=1e-9)


def with_values(path: Path, scale: float, name: str = "Qcur") -> Session:
    """A session whose Qcur was read in every layer and compute, with values of that scale."""
    random = np.random.default_rng(1)
    events: list[s.Event] = []
    graphs: dict[int, s.Graph] = {}
    for event in make_log(lambda _low, high: high, 1, "detailed"):
        events.append(event)
        if isinstance(event, s.Graph):
            graphs[event.graph] = event
        if not isinstance(event, s.Compute):
            continue
        nodes = graphs[event.graph].nodes
        assert nodes is not None
        for node, (of, op) in enumerate(zip(nodes.name, nodes.op, strict=True)):
            if of.startswith("Qcur-") and op == "MUL_MAT":
                layer = nodes.layer[node]
                told = read(
                    random.normal(1.0, scale * (layer + 1), 64), event.compute, event.graph, node
                )
                events.append(replace(told, name=f"{name}-{layer}", layer=layer))
    path.write_bytes(encode(events))
    return load_session(path)


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
    session.stats.clear()
    with pytest.raises(UsageError, match=r"no values were read; record with --stats"):
        compute_values(session)


def test_two_sessions_side_by_side(tmp_path: Path) -> None:
    a, b = with_values(tmp_path / "a.log", 2.0), with_values(tmp_path / "b.log", 6.0)
    report = compare_values(a, b)
    rows = [dict(zip((c.name for c in report.columns), row, strict=True)) for row in report.rows]
    for row in rows:
        # the same random numbers, three times as far from 1
        assert row["std B / A"] == pytest.approx(3)
        assert row["shift"] == pytest.approx((row["mean B"] - row["mean A"]) / row["std A"])
    most = max(rows, key=lambda row: abs(row["shift"]))
    assert report.title.endswith(f"in Qcur of layer {most['layer']}")
    same = compare_values(a, a)
    assert all(row[7] == 0 and row[8] == 1 for row in same.rows)
    with pytest.raises(UsageError, match="read no values of the same tensors"):
        compare_values(a, with_values(tmp_path / "c.log", 1.0, "Kcur"))


def test_a_map_has_a_cell_for_each_layer_and_compute(tmp_path: Path) -> None:
    session = with_values(tmp_path / "a.log", 2.0)
    (chart,) = chart_values(session, "A: ")
    assert chart.title == "A: Qcur (MUL_MAT): standard deviation"
    with charts._settings("black"):
        figure = charts._figure()
        chart.draw(figure)
    cells = figure.axes[0].images[0].get_array()
    wanted = [[e.std for e in session.stats if e.layer == layer] for layer in range(3)]
    assert np.asarray(cells).tolist() == wanted
