"""`quantize` writes what llama-quantize writes, and its dry run says what that will be."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.model_file import load_model_file
from llamacpp_instr.quantization import ALIASES, WRITABLE, QuantizeOptions
from llamacpp_instr.quantize import Quantizer, plan_quantization, quantize_model
from tests.conftest import Instr
from tests.native_kit import unpatched_library

QUICK = ["F16", "BF16", "F32", "Q8_0", "Q4_0", "Q4_K_M", "Q6_K", "Q2_K", "MXFP4_MOE", "TQ2_0"]
"""file types that take little time and need no importance matrix"""


def llama_quantize(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Upstream's own program, from the unpatched source."""
    return subprocess.run(
        [unpatched_library() / "llama-quantize", *map(str, arguments)],
        capture_output=True, text=True, check=True, env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )  # fmt: skip


@pytest.mark.parametrize("file_type", QUICK)
def test_the_file_is_llama_quantizes_to_the_byte(
    demo_model: Path, tmp_path: Path, file_type: str
) -> None:
    llama_quantize(demo_model, tmp_path / "theirs.gguf", file_type, 2)
    done = quantize_model(load_model_file("demo"), file_type, tmp_path / "ours.gguf")
    assert done.path.read_bytes() == (tmp_path / "theirs.gguf").read_bytes()
    assert done.file_bytes == done.path.stat().st_size


def test_the_plan_is_what_comes_true(tmp_path: Path) -> None:
    with Quantizer(load_model_file("demo")) as quantizer:
        for file_type in QUICK:
            plan = quantizer.plan(file_type)
            written = load_model_file(quantizer.write(plan, tmp_path / f"{file_type}.gguf").path)
            assert written.file_type == file_type
            assert plan.file_bytes == written.file_size
            assert plan.n_bytes == written.n_bytes
            assert [(t.name, t.type) for t in plan.tensors] == [
                (weight.name, weight.type) for weight in written.weights
            ]


def test_the_command_writes_a_file_for_each_type_and_says_its_size(
    instr: Instr, tmp_path: Path
) -> None:
    done = instr("quantize", "demo", "--types", "q8_0,Q4_K,Q4_K_M")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "demo-Q4_K_M.gguf",
        "demo-Q8_0.gguf",
    ]
    size = (tmp_path / "demo-Q8_0.gguf").stat().st_size
    assert f"demo-Q8_0.gguf    Q8_0    {size:,}         8.51     53.2 %" in done.stdout


def test_a_dry_run_writes_nothing_and_knows_every_file_type(instr: Instr, tmp_path: Path) -> None:
    types = [*WRITABLE, *ALIASES]
    done = instr("quantize", "demo", "--types", ",".join(types), "--dry-run", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert not told["written"]
    assert [file["file_type"] for file in told["files"]] == list(WRITABLE)
    assert list(tmp_path.iterdir()) == []


def test_quantizations_of_the_api_take_the_options(tmp_path: Path) -> None:
    source = load_model_file("demo")
    options = QuantizeOptions(pure=True, threads=1)
    plan = plan_quantization(source, "Q4_K", options)
    assert {str(tensor.type) for tensor in plan.tensors} == {"F32", "Q4_K"}
    done = quantize_model(source, "Q4_K", tmp_path / "pure.gguf", options)
    assert done.plan == plan
