"""The report on the error of weights: pooled correctly, for readers and scripts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.weights import weight_error_reports
from llamacpp_instr.lab.weights.figures import SAMPLE, Sums, WeightError
from llamacpp_instr.lab.weights.measure import compute_weight_errors
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.report.render import render_csv, render_html, render_markdown, render_text
from tests.kit.block_models import write_blocks
from tests.kit.quantized_kit import quantized_demo
from tests.kit.reports import by_title, rows

NAN = math.nan


def made(name: str, layer: int, sums: Sums, type_name: str = "Q4_K") -> WeightError:
    type_ = BY_NAME[type_name]
    n_bytes = type_.row_bytes(256)
    return WeightError(
        name=name, layer=layer, role=name.split(".")[-2], reference_type=BY_NAME["F16"],
        type=type_, n_elements=256, n_bytes=n_bytes, sums=sums, max_error=2.0,
        p50=0.5, p90=0.75, p99=1.0, p999=1.5, worst_block=0, worst_block_rmse=1.25, non_finite=0,
    )  # fmt: skip


ERRORS = [
    made("blk.1.up.weight", 1, Sums(256, 1000, 1000, 10)),
    made("blk.0.up.weight", 0, Sums(256, 3000, 3000, 30), "Q6_K"),
    made("blk.0.down.weight", 0, Sums(256, 100, 100, 10)),
    made("norm.weight", -1, Sums(256, 100, 100, 0), "F16"),
]


def test_what_is_rolled_up_is_pooled_from_squares() -> None:
    found = by_title(weight_error_reports(ERRORS, "A", "B"))
    (model,) = rows(found["Error of the weights of B against A"])
    assert model["SQNR"] == pytest.approx(10 * math.log10(4200 / 50))
    assert model["RMSE"] == pytest.approx(math.sqrt(50 / 1024))
    assert model["bytes"] == 144 + 210 + 144 + 512
    assert model["bits/weight"] == 8 * (144 + 210 + 144 + 512) / 1024
    down, up, norm = rows(found["By role"])
    assert (down["Role"], down["SQNR"]) == ("down", 10), "the worst first"
    assert (up["Role"], up["SQNR"]) == ("up", pytest.approx(20))
    assert up["RMSE"] == math.sqrt(40 / 512)
    assert (norm["Role"], norm["SQNR"], norm["RMSE"]) == ("norm", "inf", 0)
    assert [row["Layer"] for row in rows(found["By layer"])] == [-1, 0, 1]
    assert {row["Type"] for row in rows(found["By type"])} == {"F16 → Q4_K", "F16 → Q6_K", "F16"}


@pytest.mark.native
def test_the_model_is_pooled_as_if_it_were_one_tensor() -> None:
    errors = compute_weight_errors(load_model_file("demo"), load_model_file(quantized_demo("Q2_K")))
    (model,) = rows(weight_error_reports(errors, "A", "B")[0])
    e2 = sum(error.rmse**2 * error.n_elements for error in errors)
    n = sum(error.n_elements for error in errors)
    assert model["RMSE"] == pytest.approx(math.sqrt(e2 / n))
    assert model["bytes"] == load_model_file(quantized_demo("Q2_K")).n_bytes
    assert model["largest"] == max(error.max_error for error in errors)


def test_infinity_is_shown_as_such_and_is_valid_json() -> None:
    found = weight_error_reports(ERRORS, "A", "B")
    assert "∞" in render_text(found)
    assert "∞" in render_markdown(found)
    assert "∞" in render_html(found)
    assert "inf" in render_csv(found[-1])
    text = json.dumps([report.to_json() for report in found], allow_nan=False)
    assert json.loads(text)[-1]["rows"][-1]["sqnr"] == "inf"
    zeros = [made("a.weight", -1, Sums(256, 0, 1, 1))]
    assert "-∞" in render_text(weight_error_reports(zeros, "A", "B"))
    assert rows(weight_error_reports(zeros, "A", "B")[0])[0]["SQNR"] == "-inf"


def test_what_was_left_out_is_reported() -> None:
    skipped = replace(
        ERRORS[0], sums=Sums(), max_error=NAN, p50=NAN, p90=NAN, p99=NAN, p999=NAN,
        worst_block_rmse=NAN, skipped="gguf-py has no conversion of Q1_0", type=BY_NAME["Q1_0"],
    )  # fmt: skip
    bad = replace(ERRORS[1], non_finite=1234)
    found = weight_error_reports([skipped, bad, ERRORS[2]], "A", "B")
    notes = " ".join(found[0].notes)
    assert "Excluded: 1,234 NaN or infinite elements, in blk.0.up.weight" in notes
    assert "Not measured: blk.1.up.weight: gguf-py has no conversion of Q1_0" in notes
    assert "instr build" in notes
    row = rows(found[-1])[0]
    assert row["SQNR"] is row["RMSE"] is row["p50"] is row["worst block"] is None
    assert row["bytes"] == 144
    json.dumps([report.to_json() for report in found], allow_nan=False)


def test_nothing_measured_at_all_is_no_failure() -> None:
    skipped = [replace(error, sums=Sums(), skipped="ggml cannot") for error in ERRORS]
    for found in (skipped, []):
        assert render_text(weight_error_reports(found, "A", "B"))


def test_a_sample_is_owned_up_to() -> None:
    large = replace(ERRORS[0], n_elements=SAMPLE + 1)
    assert "even sample" in " ".join(weight_error_reports([large], "A", "B")[-1].notes)
    assert "even sample" not in " ".join(weight_error_reports(ERRORS, "A", "B")[-1].notes)


@pytest.mark.native
def test_it_fits_a_terminal(demo_model: Path) -> None:
    candidate = load_model_file(quantized_demo("Q4_K_M"))
    errors = compute_weight_errors(load_model_file(demo_model), candidate)
    text = render_text(weight_error_reports(errors, "demo.gguf", "demo-Q4_K_M.gguf"))
    assert max(map(len, text.splitlines())) <= 80
    for weight in candidate.weights:
        assert weight.name[:20] in text


def test_what_only_one_file_has_is_named_on_both_sides(tmp_path: Path) -> None:
    zeros = ("F32", np.zeros((2, 32), np.float32))
    a = write_blocks(tmp_path / "a.gguf", {"both": zeros, "mine": zeros})
    b = write_blocks(tmp_path / "b.gguf", {"both": zeros} | {f"t{i}": zeros for i in range(5)})
    words = r"only .*a\.gguf has 'mine'; only .*b\.gguf has 't0', 't1', 't2' and 2 more"
    with pytest.raises(UsageError, match=words):
        compute_weight_errors(load_model_file(b), load_model_file(a))
