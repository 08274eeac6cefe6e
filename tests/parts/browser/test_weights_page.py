"""The page of `instr weights --view` in Chromium: what it shows is what gguf-py reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.quants import dequantize

from tests.kit import ui_kit
from tests.weights_view.test_weights_page import HOSTILE, NAME, ORIGINAL, Q4_0, STORED, models

__all__ = ["models"]  # fixtures

QUANTIZED = dequantize(STORED, Q4_0)


def look(address: str, steps: list[list[Any]], width: int = 1280, **more: Any) -> dict[str, Any]:
    """What Chromium shows after each step."""
    seen = ui_kit.run_script("weights.mjs", address=address, width=width, steps=steps, **more)
    assert (seen["errors"], seen["console"], seen["foreign"]) == ([], [], [])
    return seen


@pytest.mark.native
def test_single_weights_are_those_of_gguf_py(models: tuple[Path, Path]) -> None:
    places = [(0, 0), (599, 1023), (300, 511), (17, 256), (255, 255), (256, 256)]
    with ui_kit.served(models[0], "--view", "--reference", str(models[1]), command="weights") as at:
        seen = look(at, [["tensor", NAME], *(["go", *place] for place in places)])
    assert seen["steps"][0]["panes"] == 3
    assert "600 x 1024" not in seen["steps"][0]["facts"], "a shape has the length of a row first"
    assert "Q4_0, 1024 x 600" in seen["steps"][0]["facts"]
    truths = {"0": QUANTIZED, "1": ORIGINAL, "2": QUANTIZED - ORIGINAL}
    for (row, column), step in zip(places, seen["steps"][1:], strict=True):
        assert step["level"] == "Every cell is one weight."
        assert step["where"] == f"row {row}, column {column}"
        assert step["values"].keys() == truths.keys()
        for which, truth in truths.items():
            assert np.float32(step["values"][which]) == truth[row, column]
        block, element = row * 32 + column // 32, column % 32
        assert f"(block {block}, element {element})" in step["cell"]
        head, *rows = step["near"]
        assert len(rows) == 5
        for name, *values in rows:
            for heading, value in zip(head[1:], values, strict=True):
                assert np.float32(value) == QUANTIZED[int(name), int(heading.split()[1])]


@pytest.mark.native
def test_it_zooms_from_the_whole_to_a_weight_and_back(models: tuple[Path, Path]) -> None:
    steps: list[list[Any]] = [
        ["tensor", NAME], ["hover", 0.5, 0.5], ["zoom", 12], ["hover", 0.51, 0.51], ["keys", "0"],
        ["measure", "rms"], ["keys", "+", "+", "+", "-", "ArrowLeft"], ["whole"],
    ]  # fmt: skip
    with ui_kit.served(models[0], "--view", command="weights") as address:
        seen = look(address, steps, width=400)["steps"]
    whole, pointed, close, weight, far, rms = seen[:6]
    # 600 x 1024 weights in 320 x 270 pixels: a cell covers 4 x 4
    assert whole["level"].startswith("A cell covers 4 × 4 weights and shows the one with")
    top, bottom, left, right = map(int, re.findall(r"\d+", pointed["where"]))
    cell = QUANTIZED[top : bottom + 1, left : right + 1]
    assert cell.shape == (4, 4)
    assert abs(np.float32(pointed["values"]["0"])) == np.abs(cell).max()
    assert close["level"] == weight["level"] == "Every cell is one weight."
    row, column = (int(word.split()[1]) for word in weight["where"].split(", "))
    assert np.float32(weight["values"]["0"]) == QUANTIZED[row, column]
    assert far["level"] == whole["level"]
    assert "root mean square" in rms["level"]
    assert seen[-1]["level"] == rms["level"]
    assert all(count > 20 for step in seen for count in step["drawn"]), "tiles are drawn"


@pytest.mark.native
@pytest.mark.parametrize(("width", "dark"), [(400, True), (1600, False)])
def test_the_page_fits_and_names_stay_text(
    models: tuple[Path, Path], width: int, dark: bool
) -> None:
    with ui_kit.served(models[0], "--view", "--reference", str(models[1]), command="weights") as at:
        seen = look(at, [["tensor", HOSTILE], ["tensor", NAME]], width, dark=dark)
    assert seen["overflow"] <= 0
    assert seen["steps"][0]["name"] == HOSTILE
    assert any(title.startswith(f"{HOSTILE}: F32") for title in seen["buttons"])


@pytest.mark.native
def test_figures_vectors_and_outliers_are_shown(models: tuple[Path, Path]) -> None:
    steps = [["tensor", "output_norm.weight"], ["tensor", NAME], ["figure", "bits"], ["channel", 0]]
    with ui_kit.served(models[0], "--view", command="weights") as address:
        vector, matrix, bits, outlier = look(address, steps)["steps"]
    assert (vector["charts"], vector["panes"]) == (1, 0)
    assert float(vector["numbers"]["mean"]) == pytest.approx(1, rel=1e-4)
    numbers = [float(matrix["numbers"][name]) for name in ("standard deviation", "norm")]
    truth = [float(QUANTIZED.std()), float(np.linalg.norm(QUANTIZED))]
    assert numbers == pytest.approx(truth, rel=1e-4)
    assert bits["range"] == "from 4.5, pale, to 32"
    norms = np.linalg.norm(QUANTIZED, axis=1)
    ratio = norms[417] / np.median(norms)
    assert matrix["channels"][0] == f"row 417: {ratio:.2f} × the median"
    assert outlier["level"] == "Every cell is one weight.", "it went there"
