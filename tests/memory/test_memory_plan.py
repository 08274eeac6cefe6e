"""Predicted memory equals llama.cpp's to the byte, for every file type and architecture."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama import native
from llamacpp_instr.llama.engine import (
    ContextOptions,
    LoadedModel,
    ModelContext,
)
from llamacpp_instr.llama.log import captured
from llamacpp_instr.log.schema import BufferUse, Context
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.recording.memory.breakdown import MemoryBreakdown, read_breakdown
from llamacpp_instr.recording.memory.plan import (
    MAX_CTX,
    LoadError,
    dry_run,
    plan_memory,
    plan_memory_again,
)
from llamacpp_instr.recording.session import record
from tests.conftest import read_events
from tests.kit.gguf_files import split_model
from tests.kit.mutants import damaged
from tests.kit.native_kit import DEMO, ROOT, random_model
from tests.kit.quantized_kit import QUANTIZED_FILE_TYPES, quantized_demo
from tests.kit.sparse_models import write_sparse_llama, write_with_more_rows

pytestmark = pytest.mark.native
SMALL = ContextOptions(ctx=256)
LARGE = ContextOptions(ctx=4096, cache_type_k="q8_0", cache_type_v="q4_0", flash_attn="on")
PLAIN = ContextOptions(ctx=256, batch=256, ubatch=64, flash_attn="off")
GRID = [
    ContextOptions(ctx, batch, ubatch, 2, cache_type_k, cache_type_v, flash_attn)
    for ctx, (batch, ubatch), (cache_type_k, cache_type_v), flash_attn in product(
        (256, 4096, 32768),
        ((2048, 512), (64, 32), (512, 2048)),
        (("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "f16"), ("f32", "q4_0"), ("bf16", "f32")),
        ("auto", "on", "off"),
    )
    if flash_attn != "off" or "q" not in cache_type_v
]
ARCHITECTURES = [
    "llama-dense", "llama-moe", "gemma3-dense", "gpt2-dense", "phi3-dense", "deepseek2-moe",
    "deepseek4-moe", "qwen3next-moe", "qwen4exp-moe", "mamba-dense", "mamba2-dense", "jamba-dense",
    "granitehybrid-dense", "lfm2-dense", "llama4-moe", "gpt-oss-moe", "minimax-01-moe",
    "minimax-m3-moe", "dream-dense",
]  # fmt: skip


def uses_of(buffers: list[dict[str, object]]) -> dict[tuple[str, str], int]:
    """Bytes by kind and buffer of a breakdown in the recorder's format."""
    names = {"weights": "model", "cache": "context", "compute": "compute"}
    return {
        (kind, str(use["buffer"])): int(str(use[name]))
        for kind, name in names.items()
        for use in buffers
        if use.get(name)
    }


def planned_uses(plan: MemoryBreakdown) -> dict[tuple[str, str], int]:
    return {(use.kind, use.buffer): use.n_bytes for use in plan.uses}


def held(path: Path, options: ContextOptions, mmap: bool = True) -> dict[tuple[str, str], int]:
    """The memory of a real context of the loaded model."""
    with (
        captured() as log,
        LoadedModel(path, log, mmap) as model,
        ModelContext(model, options) as context,
    ):
        assert context.handle
        return uses_of(native.load().memory(context.handle))


@pytest.mark.parametrize("file_type", QUANTIZED_FILE_TYPES)
def test_every_file_type_of_the_demo_model(file_type: str) -> None:
    model = load_model_file(quantized_demo(file_type))
    for options, mmap in ((SMALL, True), (LARGE, True), (PLAIN, False)):
        plan = dry_run(model, options, mmap)
        assert planned_uses(plan) == held(model.path, options, mmap)


@pytest.mark.parametrize("file_type", ["F16", "Q4_K_M"])
def test_every_setting_of_a_context(file_type: str) -> None:
    model = load_model_file(quantized_demo(file_type))
    for options in GRID[:: 2 if file_type == "F16" else 5]:
        assert planned_uses(dry_run(model, options, True)) == held(model.path, options), options


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str) -> None:
    model = load_model_file(random_model(name))
    for options in (SMALL, PLAIN, ContextOptions(ctx=256, ubatch=32), ContextOptions(ubatch=1)):
        assert planned_uses(dry_run(model, options, True)) == held(model.path, options), options


def test_encoders_get_a_context_for_embeddings(models: Path) -> None:
    model = load_model_file(models / "bert.gguf")
    plan = dry_run(model, ContextOptions(), True)
    assert plan.settings.embeddings
    with captured() as log, LoadedModel(model.path, log) as loaded:  # noqa: SIM117
        with ModelContext(loaded, ContextOptions(), embed_tokens=1) as context:
            assert context.handle
            assert planned_uses(plan) == uses_of(native.load().memory(context.handle))
    assert plan.of_kind("cache") == 0


def test_an_encoder_with_a_decoder(models: Path) -> None:
    model = load_model_file(models / "t5.gguf")
    assert planned_uses(dry_run(model, SMALL, True)) == held(model.path, SMALL)


def test_a_split_model_is_mapped_part_by_part(tmp_path: Path) -> None:
    first, *_ = split_model(quantized_demo("Q4_K_M"), tmp_path / "part", tensors=8)
    model = load_model_file(first)
    assert len(model.headers) > 2
    for mmap in (True, False):
        assert planned_uses(dry_run(model, SMALL, mmap)) == held(first, SMALL, mmap)


def test_a_tensor_that_is_read_on_demand_has_a_mapping_of_its_own(tmp_path: Path) -> None:
    """llama.cpp counts it twice if the range of the others includes it, and so do we."""
    source, name = random_model("qwen4exp-moe"), "per_layer_token_embd.weight"
    path = write_with_more_rows(source, tmp_path / "large.gguf", name, (4 << 30) + 1)
    model = load_model_file(path)
    plan = dry_run(model, SMALL, True)
    assert plan.of_kind("weights") > 1.9 * model.n_bytes
    assert planned_uses(plan) == held(path, SMALL)


def test_a_recorded_context_is_predicted_again(tmp_path: Path) -> None:
    model = load_model_file(random_model("gemma3-dense"))
    options = ContextOptions(1024, 128, 32, 2, "q8_0", "f16", "on")
    log = tmp_path / "session.log"
    with captured() as llama_log, record(log, level="minimal"):  # noqa: SIM117
        with LoadedModel(model.path, llama_log) as loaded, ModelContext(loaded, options):
            pass
    (context,) = read_events(log, "context")
    (memory,) = read_events(log, "memory")
    del context["event"], memory["event"]
    measured = read_breakdown(
        Context(**context), [BufferUse(**use) for use in memory["buffers"]], []
    )
    assert measured.settings.n_ubatch == 32
    again = plan_memory_again(model, measured)
    assert again.settings == measured.settings
    assert again.uses == measured.uses == plan_memory(model, options).uses


def test_a_session_that_is_being_recorded_hears_nothing_of_it(tmp_path: Path) -> None:
    with record(tmp_path / "session.log"):
        assert plan_memory(load_model_file(DEMO), SMALL).uses
    assert {event["event"] for event in read_events(tmp_path / "session.log")} == {
        "session_start",
        "session_end",
    }


def test_a_file_of_twenty_gigabytes_costs_no_memory(tmp_path: Path) -> None:
    """The prediction takes as much memory as for a small model."""
    path = write_sparse_llama(tmp_path / "large.gguf", layers=44, width=4096, feed_forward=22016)
    assert path.stat().st_size > 20e9
    code = (
        "import resource, sys\n"
        "from llamacpp_instr.llama.engine import ContextOptions\n"
        "from llamacpp_instr.recording.memory.plan import dry_run\n"
        "from llamacpp_instr.model.file import load_model_file\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "dry_run(load_model_file('demo'), ContextOptions(), True)\n"
        "before = peak()\n"
        "plan = dry_run(load_model_file(sys.argv[1]), ContextOptions(ctx=131072), True)\n"
        "print(plan.of_kind('weights'), plan.of_kind('cache'), peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], cwd=ROOT, check=True, capture_output=True, text=True
    )
    weights, cache, grown = map(int, done.stdout.split())
    model = load_model_file(path)
    assert model.n_bytes <= weights < model.n_bytes * 1.01
    # keys and values of two bytes, of all layers
    assert cache == 131072 * 2 * 2 * 4096 * 44
    assert grown < 100e6, f"{grown:,} bytes"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ContextOptions(ctx=0), "--ctx is 0"),
        (ContextOptions(flash_attn="off", cache_type_v="q8_0"), "needs flash attention"),
        (ContextOptions(threads=100_000), "--threads is 100000"),
        (ContextOptions(ctx=MAX_CTX + 1), "predicted for up to 33,554,432"),
    ],
)
def test_options_are_checked(options: ContextOptions, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        plan_memory(load_model_file("demo"), options)


def test_a_vocabulary_alone_has_no_memory(models: Path) -> None:
    with pytest.raises(UsageError, match="only a vocabulary"):
        plan_memory(load_model_file(models / "vocabulary.gguf"), SMALL)


def test_positions_that_the_model_has_not_learned(models: Path) -> None:
    with pytest.raises(UsageError, match="positions"):
        plan_memory(load_model_file(models / "gpt2.gguf"), ContextOptions(ctx=4096))


def test_metadata_that_llama_cpp_aborts_on(tmp_path: Path) -> None:
    """The end of the child is one line, and this process continues."""
    source = random_model("gemma3-dense")
    path = damaged(source, tmp_path / "hostile.gguf", "gemma3.attention.key_length", 0)
    with pytest.raises(LoadError) as refused:
        plan_memory(load_model_file(path), SMALL)
    line = str(refused.value)
    assert line.startswith(f"{path}: llama.cpp ended the process: ggml")
    assert "\n" not in line
    assert "build" not in line, "without the path of the source folder"


def test_metadata_that_is_no_number(tmp_path: Path) -> None:
    path = damaged(DEMO, tmp_path / "nan.gguf", "llama.rope.freq_base", math.nan)
    assert (
        plan_memory(load_model_file(path), SMALL).uses
        == plan_memory(load_model_file(DEMO), SMALL).uses
    )


def test_metadata_that_claims_memory(tmp_path: Path) -> None:
    """A vocabulary that claims two billion tokens but does not contain them."""
    small = write_sparse_llama(tmp_path / "small.gguf", layers=1, width=256, feed_forward=512)
    path = damaged(small, tmp_path / "large.gguf", "llama.vocab_size", 2**31 - 1)
    with pytest.raises(LoadError, match="bad_alloc"):
        plan_memory(load_model_file(path), SMALL)
