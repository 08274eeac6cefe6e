"""`instr weights`: its reports and their maps."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.model.file import load_model_file
from tests.kit import in_process
from tests.kit.block_models import write_blocks
from tests.kit.in_process import printed
from tests.kit.reports import Row

RANDOM = np.random.default_rng(11)
HOSTILE = "blk.0.<img src=x onerror=alert(1)>\x1b[31m"


def reports(*words: object) -> dict[str, Row]:
    return {report["title"]: report for report in in_process.json_reports("weights", *words)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two layers; in the second, one row of ffn_up is ten times as large."""
    tensors = {}
    for layer in range(2):
        for role in ("ffn_up", "ffn_down"):
            x = RANDOM.normal(0, 1 + layer, (64, 32)).astype(np.float32)
            if (layer, role) == (1, "ffn_up"):
                x[17] *= 10
            tensors[f"blk.{layer}.{role}.weight"] = ("F32", x)
        tensors[f"blk.{layer}.ffn_norm.weight"] = ("F32", np.ones(32, np.float32))
    return write_blocks(tmp_path / "model.gguf", tensors)


def values(path: Path, name: str) -> np.ndarray:
    weight = load_model_file(path).by_name[name]
    return np.fromfile(path, "<f4", weight.n_elements, offset=weight.offset).astype(float)


def test_a_role_has_the_figures_of_all_its_weights(model: Path) -> None:
    (role,) = (
        row for row in reports(model)["Weights of model.gguf"]["rows"] if row["Role"] == "ffn_up"
    )
    both = np.concatenate([values(model, f"blk.{i}.ffn_up.weight") for i in (0, 1)])
    assert (role["tensors"], role["bytes"]) == (2, both.size * 4)
    assert role["std"] == pytest.approx(both.std())
    assert role["RMS"] == pytest.approx(np.sqrt(np.mean(both**2)))
    assert role["largest"] == np.abs(both).max()
    assert role["outlier rows"] >= 1


def test_every_tensor_has_its_figures(model: Path) -> None:
    rows = reports(model)["Figures of each tensor"]["rows"]
    assert [row["Tensor"] for row in rows] == [w.name for w in load_model_file(model).weights]
    for row in rows:
        x = values(model, row["Tensor"])
        assert row["mean"] == pytest.approx(x.mean())
        assert row["norm"] == pytest.approx(np.linalg.norm(x))
        assert [row[f"p{p:g}"] for p in (0.1, 1, 50, 99, 99.9)] == pytest.approx(
            np.percentile(x, [0.1, 1, 50, 99, 99.9]).tolist()
        )
    norm = next(row for row in rows if "norm" in row["Tensor"])
    assert norm["row outliers"] is norm["kurtosis"] is None


def test_the_row_that_is_too_large_comes_first(model: Path) -> None:
    report = reports(model)["Outlier channels"]
    first = report["rows"][0]
    assert (first["Tensor"], first["side"], first["channel"]) == ("blk.1.ffn_up.weight", "row", 17)
    assert 8 < first["times the median"] < 12
    n = report["figures"]["outlier rows"]["value"] + report["figures"]["outlier columns"]["value"]
    assert n >= len(report["rows"]) >= 1
    assert "3.5" in report["notes"][0]


def test_a_pattern_leaves_the_others_out(model: Path) -> None:
    rows = reports(model, "*ffn_up*")["Figures of each tensor"]["rows"]
    assert [row["Tensor"] for row in rows] == [f"blk.{i}.ffn_up.weight" for i in (0, 1)]


def test_against_the_original_also_the_errors(model: Path, tmp_path: Path) -> None:
    changed = {
        w.name: ("F32", values(model, w.name).astype(np.float32).reshape(w.ne[::-1]))
        for w in load_model_file(model).weights
    }
    changed["blk.0.ffn_up.weight"][1][3, 4] += 1
    other = write_blocks(tmp_path / "changed.gguf", changed)
    title = "Error of the weights of changed.gguf against model.gguf"
    (row,) = reports(other, "*ffn_up*", "--reference", model)[title]["rows"]
    assert row["largest"] == pytest.approx(1, abs=1e-5)
    assert row["RMSE"] == pytest.approx((1 / 4096) ** 0.5, rel=1e-4)


def test_csv_is_the_table_of_tensors(model: Path) -> None:
    head, *rows = csv.reader(printed("weights", model, "--csv").splitlines())
    assert head[:4] == ["Tensor", "type", "shape", "bytes"]
    assert len(rows) == 6


def test_a_page_has_maps_of_layers_and_roles_and_names_stay_text(tmp_path: Path) -> None:
    tensors = {
        "blk.0.ffn_up.weight": ("F32", RANDOM.normal(size=(8, 8)).astype(np.float32)),
        HOSTILE: ("F32", RANDOM.normal(size=(8, 8)).astype(np.float32)),
    }
    out = tmp_path / "out.html"
    model = write_blocks(tmp_path / "m.gguf", tensors)
    printed("weights", model, "-o", out)
    page = out.read_text()
    for title in ("Root mean square", "Largest weight, in standard deviations", "Outlier channels"):
        assert f'aria-label="{title}' in page
    assert "<img" not in page
    assert "\x1b" not in page
    text = printed("weights", model)
    assert "\\x1b[31m" in text
    assert "\x1b" not in text
