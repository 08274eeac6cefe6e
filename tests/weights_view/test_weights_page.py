"""The page of `instr weights --view` in Chromium: what it shows is what gguf-py reads."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import gguf
import numpy as np
import pytest
from gguf.quants import quantize

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
NAME = "blk.0.ffn_up.weight"
HOSTILE = "blk.0.<img src=x onerror=alert(1)>"


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
        connection = http.client.HTTPConnection(place.netloc, timeout=300)
        connection.request("GET", f"{place.path}tensors")
        models = json.loads(connection.getresponse().read())["models"]
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert models == [word for word in words if word.endswith(".gguf")]
