"""Every node of every architecture computes in ONNX what llama.cpp computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exports.test_onnx import check, compute
from tests.kit.native_kit import random_model, random_models

pytestmark = pytest.mark.native


def architectures() -> list[str]:
    return sorted(model.stem for model in random_models().glob("*.gguf"))


@pytest.mark.parametrize("part", range(8))
def test_every_node_of_every_architecture(part: int, tmp_path: Path) -> None:
    for architecture in architectures()[part::8]:
        model = random_model(architecture)
        for computed in compute(model, tmp_path / f"{architecture}.log"):
            check(architecture, model, computed)
