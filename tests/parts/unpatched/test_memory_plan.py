"""The unpatched library logs the sizes of buffers that we predict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamacpp_instr.llama.engine import (
    CACHE_TYPES,
    FLASH_ATTN,
    ContextOptions,
)
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.recording.memory.plan import (
    dry_run,
)
from tests.kit.native_kit import DEMO, ROOT, random_model, unpatched_library
from tests.kit.quantized_kit import quantized_demo
from tests.memory.test_memory_plan import ARCHITECTURES, GRID, LARGE, SMALL, planned_uses

pytestmark = pytest.mark.native
MIB = 1 << 20
QUANTIZED_TRUTH = ["Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K", "IQ4_XS", "IQ4_NL"]


@pytest.fixture(scope="module")
def truth() -> list[tuple[Path, ContextOptions, dict[str, dict[str, float]]]]:
    jobs = [
        *((DEMO, options) for options in GRID[::17]),
        *((random_model(name), SMALL) for name in ARCHITECTURES),
        *((quantized_demo(t), LARGE) for t in QUANTIZED_TRUTH),
    ]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "kit" / "memory_truth.py")],
        input=json.dumps([[str(path), as_params(options)] for path, options in jobs]),
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(unpatched_library())},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    answers = json.loads(done.stdout)
    return [(*job, answer) for job, answer in zip(jobs, answers, strict=True)]


def as_params(options: ContextOptions) -> dict[str, int]:
    """The fields of `llama_context_params`."""
    return {
        "n_ctx": options.ctx or 0,
        "n_batch": options.batch or 2048,
        "n_ubatch": options.ubatch or 512,
        "type_k": CACHE_TYPES[options.cache_type_k],
        "type_v": CACHE_TYPES[options.cache_type_v],
        "flash_attn_type": FLASH_ATTN[options.flash_attn],
    }


def test_the_unpatched_library_logs_the_same_sizes(
    truth: list[tuple[Path, ContextOptions, dict[str, dict[str, float]]]],
) -> None:
    kinds = set()
    for path, options, logged in truth:
        assert logged, path
        plan = dry_run(load_model_file(path), options, True)
        real = {(k, b): mib for k, buffers in logged.items() for b, mib in buffers.items()}
        planned = {use: n / MIB for use, n in planned_uses(plan).items()}
        kinds |= set(planned)
        for use in set(real) | set(planned):
            # each figure of a line is rounded to 0.01 MiB
            rounding = 0.03
            assert real.get(use, 0) == pytest.approx(planned.get(use, 0), abs=rounding), (path, use)
    assert {("weights", "CPU_Mapped"), ("cache", "CPU"), ("compute", "CPU")} <= kinds
