"""An alignment that llama-quantize would not keep is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.model.file import load_model_file
from tests.kit.quantize_kit import (
    llama_quantize,
    plan_quantization,
    write_model,
)

pytestmark = pytest.mark.native


def test_an_alignment_that_the_quantizer_would_not_keep(tmp_path: Path) -> None:
    """llama-quantize pads to 32 bytes, although the header says 128."""
    path = write_model(tmp_path / "model.gguf", 40, alignment=128)
    with pytest.raises(UsageError, match=r"general\.alignment 128"):
        plan_quantization(load_model_file(path), "F16")

    llama_quantize(path, tmp_path / "theirs.gguf", "F16")
    with pytest.raises(UsageError, match="truncated"):
        load_model_file(tmp_path / "theirs.gguf")
