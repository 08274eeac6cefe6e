"""What a shell completes, with requests like those of bash."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from llamacpp_instr.log.graph.words import OPS


def completed(*words: str) -> list[str]:
    """What bash offers for the last word."""
    environment = {
        **os.environ,
        "_INSTR_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["instr", *words]),
        "COMP_CWORD": str(len(words)),
    }
    code = "import sys; sys.argv = ['instr']; from llamacpp_instr.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.split("\n") if line]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sta"], ["stats"]),
        (["stats", "--by", "la"], ["layer"]),
        (["stats", "--by", "layer,o"], ["layer,op"]),
        (["stats", "--by", "op,o"], []),
        (["tree", "--by", "f"], ["flops"]),
        (["stats", "--ops", "mul_mat_"], ["MUL_MAT_ID"]),
        (["to-perfetto", "--ops", "ROPE,FLASH"], ["ROPE,FLASH_ATTN_EXT"]),
        (["quantize", "--types", "Q8_0,q4_k_m"], ["Q8_0,Q4_K_M"]),
        (["quantize", "--tensor-type", "*ffn_down*=q6"], ["*ffn_down*=Q6_K"]),
        (["predict", "--types", "iq4_x"], ["IQ4_XS"]),
        (["compare", "--types", "Q6"], ["Q6_K"]),
        (["quantize", "--types", "NVFP"], []),  # llama.cpp only reads it
    ],
)
def test_bash_is_offered(words: list[str], offered: list[str]) -> None:
    assert completed(*words) == offered


def test_all_ops_are_offered_where_nothing_is_typed() -> None:
    assert completed("stats", "--ops", "") == list(OPS)
