"""The tables of weights and of files whose figures are written by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.converters.analyses import weights
from llamacpp_instr.converters.analyses.inspect import (
    _bytes,
    _cut,
    _scalar,
    compute_inspection,
    compute_tensors,
)
from llamacpp_instr.converters.analyses.weights import each_tensor, weight_reports
from llamacpp_instr.lab.weights.figures import (
    PERCENTS,
    Channel,
    Channels,
    Histogram,
    Moments,
    WeightStats,
)
from llamacpp_instr.model.file import Weight, load_model_file
from tests.kit.block_models import half, rows_of, write_blocks
from tests.kit.reports import by_title, rows


@pytest.fixture
def weight(tmp_path: Path) -> Weight:
    path = write_blocks(tmp_path / "m.gguf", {"blk.0.up.weight": ("F32", np.ones((2, 4), "f4"))})
    return load_model_file(path).weights[0]


def channels(*times: float, n: int | None = None) -> Channels:
    worst = [Channel(i, 10 * of, of, 4.0) for i, of in enumerate(times)]
    return Channels(64, 10.0, 99.0, len(times) if n is None else n, worst)


def stats(weight: Weight, **of: Any) -> WeightStats:
    known: dict[str, Any] = {
        "moments": Moments(8, 1.0, 8.0, 0.0, 24.0), "n_zero": 2, "non_finite": 0, "largest": 3.0,
        "percentiles": tuple(map(float, range(len(PERCENTS)))), "histogram": Histogram(1.0, [8]),
        "rows": None, "columns": None,
    }  # fmt: skip
    return WeightStats(weight, **{**known, **of})


def test_a_row_has_the_figures_of_its_tensor(weight: Weight) -> None:
    found = each_tensor([stats(weight, rows=channels(5.0, n=3))])
    (row,) = rows(found)
    assert (row["Tensor"], row["type"], row["shape"]) == ("blk.0.up.weight", "F32", "4 x 2")
    assert (row["bytes"], row["mean"], row["std"], row["largest"]) == (32, 1.0, 1.0, 3.0)
    assert (row["zeros"], row["norm"]) == (0.25, pytest.approx(math.sqrt(8 + 8)))
    assert (row["row median"], row["row largest"], row["row outliers"]) == (10.0, 99.0, 3)
    assert row["column median"] is row["column largest"] is row["column outliers"] is None
    assert len(found.notes) == 1


def test_a_tensor_without_a_finite_element_has_no_figures(weight: Weight) -> None:
    none = stats(weight, moments=Moments(), n_zero=0, non_finite=8, largest=math.nan)
    one = stats(weight, non_finite=1)
    report = each_tensor([none, one])
    first = rows(report)[0]
    assert [first[name] for name in ("mean", "std", "largest", "zeros")] == [None] * 4
    assert report.notes[1].startswith("Excluded: 9 NaN or infinite elements, in ")
    (role,) = rows(weight_reports([none], "m")[0])
    assert (role["largest"], role["zeros"], role["outlier rows"]) == (None, None, None)
    (role,) = rows(weight_reports([none, one], "m")[0])
    assert (role["largest"], role["tensors"], role["bytes"]) == (3.0, 2, 64)


@pytest.mark.parametrize(("most", "sampled"), [(7, True), (8, False)])
def test_a_sample_is_named(
    most: int, sampled: bool, weight: Weight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "SAMPLE", most)
    notes = each_tensor([stats(weight)]).notes
    assert ("Percentiles of more than 7 elements come from an even sample." in notes) == sampled


def test_outliers_of_all_tensors_are_in_order(weight: Weight) -> None:
    report = weight_reports([
        stats(weight, rows=channels(5.0, 2.0), columns=channels(3.0, n=4)),
        stats(weight, rows=channels(), columns=None),
    ], "m")[2]  # fmt: skip
    assert [row[1:] for row in report.rows] == [
        ["row", 0, 50.0, 5.0, 4.0], ["column", 0, 30.0, 3.0, 4.0], ["row", 1, 20.0, 2.0, 4.0],
    ]  # fmt: skip
    assert report.figures == {"outlier rows": (2, "count"), "outlier columns": (4, "count")}
    assert len(report.notes) == 1
    assert weight_reports([stats(weight)], "m")[2].notes[1:] == ["No channel is an outlier."]


@pytest.mark.parametrize("most", [2, 3, 4])
def test_outliers_that_are_not_listed_are_counted(
    most: int, weight: Weight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "MOST_CHANNELS", most)
    of = stats(weight, rows=channels(5.0, 4.0, n=30), columns=channels(3.0, n=4))
    report = weight_reports([of], "m")[2]
    assert len(report.rows) == min(most, 3)
    notes = ["The 2 furthest above their median, of 34."] if most < 3 else []
    assert report.notes[1:] == notes


# --- files ---


def test_the_facts_of_a_file(tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "m.gguf", {
        "blk.0.up.weight": ("Q8_0", rows_of([half(1) + bytes(32)] * 2, 1)),
        "norm.weight": ("F32", np.ones(8, np.float32)),
    })  # fmt: skip
    model = load_model_file(path)
    found = by_title(compute_inspection(model))
    facts = {row[0]: row[1] for row in found["Model"].rows}
    assert facts["file"] == str(path)
    assert (facts["tensors"], facts["parameters"], facts["architecture"]) == (2, 72, "llama")
    assert facts["bytes of the weights"] == 68 + 32
    assert facts["bits per weight"] == round(8 * 100 / 72, 4)
    assert "parts" not in facts
    assert "kind" not in facts
    tensors = rows(compute_tensors(model))
    assert [row["part"] for row in tensors] == [None, None]
    assert [(row["layer"], row["role"], row["bits/weight"]) for row in tensors] == [
        (0, "up", 8.5), (-1, "norm", 32),
    ]  # fmt: skip


def test_values_of_a_header_as_they_are_shown() -> None:
    assert (_scalar(True), _scalar(False), _scalar(7)) == ("yes", "no", 7)
    assert (_scalar(9.999999747378752e-06), _scalar(math.inf)) == (1e-05, "inf")
    assert _bytes("x", 1023) == ["x", 1023, None]
    assert _bytes("x", 1024) == ["x", 1024, "1.00 KiB"]


def test_a_long_text_is_cut() -> None:
    from llamacpp_instr.converters.analyses.inspect import LONG_TEXT

    assert _cut("x" * LONG_TEXT) == "x" * LONG_TEXT
    assert _cut("x" * (LONG_TEXT + 1)) == "x" * LONG_TEXT + "…"
