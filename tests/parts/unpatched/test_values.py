"""What a stop shows is what llama.cpp's own eval callback reads there, bit for bit.

The truth comes from a program with the unpatched library that writes what llama.cpp's example
`eval-callback` reads; for the demo model, also from the text that the example itself prints. Stops
and followers that change nothing change no logit.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import tensor_at
from llamacpp_instr.model.types import TYPES
from tests.kit.debugger_kit import opened, prompt_of, run
from tests.kit.native_kit import DEMO, random_model, unpatched_library
from tests.kit.programs import native_program
from tests.kit.quantized_kit import QUANTIZED_FILE_TYPES, quantized_demo

pytestmark = pytest.mark.native

ARCHITECTURES = (
    "llama-dense", "llama4-moe", "gemma2-dense", "gemma3-dense", "gpt2-dense", "gpt-oss-moe",
    "qwen3-dense", "qwen3moe-moe", "qwen35-dense", "phi3-dense", "falcon-dense", "bloom-dense",
    "mpt-dense", "mamba2-dense", "jamba-dense", "deepseek2-moe", "lfm2-dense", "olmo2-dense",
    "cohere2-dense", "granitemoe-moe", "nemotron_h-dense", "minimax-m3-moe", "kimi-linear-moe",
    "glm5-next-moe",
)  # fmt: skip
TOKENS, FIRST = 9, 3
VIEWS = ("RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")
PROMPT = "Once upon a time"

_DTYPES = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I64": np.int64}

Dump = list[tuple[str, np.ndarray]]


@pytest.fixture(scope="module")
def eval_dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_program("eval_dump", tmp_path_factory.mktemp("eval_dump"), unpatched_library())


@pytest.fixture(scope="module")
def log_flusher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    flags = ("-shared", "-fPIC", "-Wl,--no-as-needed", "-lllama-common")
    folder = tmp_path_factory.mktemp("flush_log")
    return native_program("flush_log", folder, unpatched_library(), flags)


def truth(program: Path, model: Path, to: Path) -> Dump:
    subprocess.run([program, model, to, str(TOKENS), str(FIRST)], check=True)
    data, at = to.read_bytes(), 0
    found: Dump = []
    while at < len(data):
        end = data.index(b"\n", at)
        name, type_, *numbers = data[at:end].decode().split("\t")
        *sizes, n_bytes = map(int, numbers)
        at = end + 1 + n_bytes
        stored = np.frombuffer(data[end + 1 : at], _DTYPES[TYPES[int(type_)].name])
        # views of a cache have gaps between their rows
        values = as_strided(stored, sizes[3::-1], sizes[:3:-1])
        found.append((name, values))
    return found


def stops(model: Path, log: Path, prompt: str = "") -> Dump:
    """The values at every stop; by default, for the same prompt as `truth`."""
    found: Dump = []

    def keep(stop: Stop) -> None:
        sizes = list(tensor_at(stop.node.address).ne)
        found.append((stop.node.name, stop.values().reshape(sizes[::-1])))

    with opened(model) as loaded:
        tokens = loaded.tokenize(prompt) if prompt else prompt_of(loaded, TOKENS, FIRST)
        run(loaded, log, breakpoints=["*"], on_stop=keep, prompt=tokens, decodes=0)
    return found


def printed(
    program: Path, model: Path, log_flusher: Path
) -> list[tuple[str, list[str], list[str]]]:
    """Name, numbers and sums of each tensor that is computed, as the example prints them."""
    command = [program, "-m", model, "-p", PROMPT, "-c", "256", "-t", "1", "-fa", "on"]
    environment = os.environ | {"LD_PRELOAD": str(log_flusher)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: list[tuple[str, list[str], list[str]]] = []
    for line in done.stdout.splitlines():
        if head := re.search(r"common_debug_cb_eval: +(.+?) = \(\w+\) +(\w+)\(", line):
            found.append((head[1] if head[2] not in VIEWS else "", [], []))
        elif found and "sum = " in line:
            found[-1][2].append(line.split("sum = ")[1])
        elif found:
            found[-1][1].extend(re.findall(r"-?(?:nan|inf|[0-9]+\.[0-9]{4})", line))
    return [tensor for tensor in found if tensor[0]]


def as_printed(values: np.ndarray) -> tuple[list[str], list[str]]:
    """The example prints three rows and columns from each side, and sums in float32, in order."""
    seen = [range(n) if n <= 6 else (0, 1, 2, n - 3, n - 2, n - 1) for n in values.shape[1:]]
    numbers = values[np.ix_(range(len(values)), *seen)].astype(np.float32).ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.add.accumulate(values.astype(np.float32).ravel())[-1]
    return [f"{number:.4f}" for number in numbers], [f"{total:.6f}"] * len(values)


def same(shown: np.ndarray, real: np.ndarray) -> bool:
    """F16 is shown as float32, which holds it exactly."""
    return shown.size == real.size and shown.tobytes() == real.astype(shown.dtype).tobytes()


def check(program: Path, model: Path, folder: Path) -> None:
    real = truth(program, model, folder / "truth")
    shown = stops(model, folder / "debug.log")
    assert [name for name, _ in shown] == [name for name, _ in real]
    assert len(real) > 20
    assert [n for (n, a), (_, b) in zip(shown, real, strict=True) if not same(a, b)] == []


@pytest.mark.parametrize("file_type", ["F32", "F16", "Q8_0", "Q4_K_M"])
def test_llama_cpps_own_example_prints_these_values(
    file_type: str, log_flusher: Path, tmp_path: Path
) -> None:
    model = quantized_demo(file_type)
    real = printed(unpatched_library() / "llama-eval-callback", model, log_flusher)
    shown = stops(model, tmp_path / "debug.log", PROMPT)
    assert [name for name, _, _ in real] == [name for name, _ in shown]
    assert len(real) > 50
    for (name, *theirs), (_, values) in zip(real, shown, strict=True):
        assert theirs == [*as_printed(values)], name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_are_those_of_the_eval_callback_for_every_architecture(
    architecture: str, eval_dump: Path, tmp_path: Path
) -> None:
    check(eval_dump, random_model(architecture), tmp_path)


@pytest.mark.parametrize("file_type", QUANTIZED_FILE_TYPES)
def test_values_are_those_of_the_eval_callback_for_every_type(
    file_type: str, eval_dump: Path, tmp_path: Path
) -> None:
    check(eval_dump, quantized_demo(file_type), tmp_path)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "name",
    ["demo", "Q4_K_M", "gemma2-dense", "qwen3moe-moe", "mamba2-dense", "gpt-oss-moe",
     "bloom-dense"],
)  # fmt: skip
def test_stops_after_every_op_change_no_logit(name: str, threads: int, tmp_path: Path) -> None:
    """Even where a norm and the product that follows it are one kernel without stops."""
    path = {"demo": DEMO, "Q4_K_M": quantized_demo("Q4_K_M")}.get(name)
    seen = 0

    def count(_stop: Stop) -> None:
        nonlocal seen
        seen += 1

    with opened(path or random_model(name)) as model:
        plain = run(model, threads=threads)
        stopped = run(
            model, tmp_path / "debug.log", breakpoints=["*"], on_stop=count, threads=threads
        )
    assert seen > 100
    assert stopped.same_bits(plain)
