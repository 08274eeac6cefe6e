"""Weights that are repacked for AVX2 are planned to the byte."""

from __future__ import annotations

import pytest

from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.recording.memory.plan import (
    dry_run,
)
from tests.kit.quantized_kit import quantized_demo
from tests.memory.test_memory_plan import SMALL

pytestmark = pytest.mark.native


def test_a_quantized_type_is_repacked_and_its_bytes_stay_mapped() -> None:
    model = load_model_file(quantized_demo("Q4_0"))
    plan = dry_run(model, SMALL, True)
    repacked = plan.of("weights", "CPU_REPACK")
    assert repacked
    assert plan.of_kind("weights") > model.n_bytes, "bytes between in the file are mapped too"
    assert plan.buffers_of()["blk.0.ffn_up.weight"] == ["CPU_REPACK"]
    assert plan.buffers_of()["blk.0.ffn_norm.weight"] == ["CPU_Mapped"]
