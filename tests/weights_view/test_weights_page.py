"""The page of `instr weights --view` in Chromium: what it shows is what gguf-py reads."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from tests.kit import ui_kit
from tests.kit.block_models import write_blocks
from tests.kit.commands_kit import Line, one_line
from tests.kit.native_kit import DEMO, ROOT

RUNS = [
    one_line(
        "docs/reference/commands.md",
        "instr weights model-Q4_K_M.gguf --view --reference model-F16.gguf",
    ),
    one_line(
        "docs/how-to/look-at-weights.md",
        "instr weights model-Q4_K_M.gguf --view --reference model-F16.gguf",
    ),
]
"""commands of the pages that serve until Ctrl-C; tests/pages leaves them to this file"""

RANDOM = np.random.default_rng(4)
ORIGINAL = RANDOM.normal(0, 0.02, (600, 1024)).astype(np.float32)
ORIGINAL[417] *= 3
Q4_0 = gguf.GGMLQuantizationType.Q4_0
STORED = quantize(ORIGINAL, Q4_0)
QUANTIZED = dequantize(STORED, Q4_0)
NAME = "blk.0.ffn_up.weight"
HOSTILE = "blk.0.<img src=x onerror=alert(1)>"


def look(address: str, steps: list[list[Any]], width: int = 1280, **more: Any) -> dict[str, Any]:
    """What Chromium shows after each step."""
    seen = ui_kit.run_script("weights.mjs", address=address, width=width, steps=steps, **more)
    assert (seen["errors"], seen["console"], seen["foreign"]) == ([], [], [])
    return seen


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantized model and its original, with a tensor whose name is markup."""
    directory = tmp_path_factory.mktemp("models")
    norm = ("F32", np.linspace(0.5, 1.5, 1024, dtype=np.float32))
    rest = {HOSTILE: ("F32", np.ones((4, 8), np.float32)), "output_norm.weight": norm}
    quantized = write_blocks(directory / "model-Q4_0.gguf", {NAME: ("Q4_0", STORED), **rest})
    original = write_blocks(directory / "model-F32.gguf", {NAME: ("F32", ORIGINAL), **rest})
    return quantized, original


@pytest.mark.native
def test_single_weights_are_those_of_gguf_py(models: tuple[Path, Path]) -> None:
    ui_kit.need_ui()
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
    ui_kit.need_ui()
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
    ui_kit.need_ui()
    with ui_kit.served(models[0], "--view", "--reference", str(models[1]), command="weights") as at:
        seen = look(at, [["tensor", HOSTILE], ["tensor", NAME]], width, dark=dark)
    assert seen["overflow"] <= 0
    assert seen["steps"][0]["name"] == HOSTILE
    assert any(title.startswith(f"{HOSTILE}: F32") for title in seen["buttons"])


@pytest.mark.native
def test_figures_vectors_and_outliers_are_shown(models: tuple[Path, Path]) -> None:
    ui_kit.need_ui()
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


@pytest.mark.native
@pytest.mark.parametrize("line", RUNS, ids=lambda line: f"{line.page}: {line.text}")
def test_the_examples_work(line: Line, tmp_path: Path) -> None:
    """As a reader types them; a browser is a program that the environment names."""
    for name in ("model-Q4_K_M.gguf", "model-F16.gguf"):
        (tmp_path / name).symlink_to(DEMO)
    words = [sys.executable, "-m", "llamacpp_instr", *line.text.split()[1:]]
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "BROWSER": "true", "PYTHONPATH": str(ROOT)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        place = urlsplit(process.stdout.readline().strip())
        connection = http.client.HTTPConnection(place.netloc, timeout=10)
        connection.request("GET", f"{place.path}tensors")
        models = json.loads(connection.getresponse().read())["models"]
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert models == [word for word in words if word.endswith(".gguf")]
