"""Netron shows the graph that `instr to-onnx` writes."""

from __future__ import annotations

from pathlib import Path

import netron
import onnx
import pytest

from tests.kit import ui_kit
from tests.kit.in_process import printed

pytestmark = pytest.mark.native


def test_netron_shows_the_graph(tmp_path: Path) -> None:
    out = tmp_path / "graph.onnx"
    printed("to-onnx", "demo", "-o", out, "--no-weights")
    graph = onnx.load(out).graph
    address = "http://{}:{}".format(*netron.start(str(out), ("127.0.0.1", 0), browse=False))
    try:
        seen = ui_kit.run_script("netron.mjs", address=address)
    finally:
        netron.stop()
    returned = {of.name for of in graph.output}
    weights = {of.name for of in graph.input if "weight" in of.name}
    shown = len(graph.node) + len(graph.input) + len(graph.output)
    assert returned
    assert weights
    assert seen == {"operators": shown, "title": str(out)}
