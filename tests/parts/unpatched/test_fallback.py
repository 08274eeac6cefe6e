"""The tensors that fell back are those that llama-quantize warned about."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.converters.analyses.inspect import compute_inspection
from llamacpp_instr.lab.quantize.plan import find_fallbacks
from llamacpp_instr.model.file import ModelFile, load_model_file
from tests.kit import native_kit, tiny_models

pytestmark = pytest.mark.native

WARNING = re.compile(
    r"warning: (\S+) +- ncols +(\d+) not divisible by +(\d+) \(required for type +(\w+)\)"
    r".*?-> falling back to +(\w+)"
)


def quantize(
    source: Path, into: Path, *options: str
) -> tuple[ModelFile, dict[str, tuple[str, str]]]:
    """llama-quantize's file, and tensor -> (wanted type, fallback type) from its warnings."""
    program = native_kit.unpatched_library() / "llama-quantize"
    flags, (file_type,) = options[:-1], options[-1:]
    command = [program, *flags, source, into, file_type, "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    warned = {m[1]: (m[4].upper(), m[5].upper()) for m in WARNING.finditer(printed)}
    assert len(warned) == printed.count("not divisible"), "every warning was parsed"
    return load_model_file(into), warned


def found(model: ModelFile) -> dict[str, tuple[list[str], str]]:
    return {
        fallback.weight.name: ([type_.name for type_ in fallback.wanted], fallback.weight.type.name)
        for fallback in find_fallbacks(model)
    }


@pytest.mark.parametrize(
    "file_type", ["Q4_K_M", "Q2_K", "Q5_K_S", "Q6_K", "IQ4_XS", "TQ2_0", "Q4_0"]
)
@pytest.mark.parametrize(
    "name", ["llama-dense", "llama-moe", "falcon-dense", "mamba-dense", "qwen3next-moe", "t5"]
)
def test_what_llama_quantize_warned_of(
    tmp_path: Path, models: Path, name: str, file_type: str
) -> None:
    source = native_kit.random_model(name)
    if name == "t5":  # rows of 32 and 64
        source = models / "t5.gguf"
    model, warned = quantize(source, tmp_path / "quantized.gguf", file_type)
    assert warned or file_type == "Q4_0"
    fallbacks = found(model)
    assert set(warned) <= set(fallbacks)
    assert all(
        wanted in fallbacks[name][0] and fallbacks[name][1] == has
        for name, (wanted, has) in warned.items()
    )
    # it prints nothing about one tensor: the output matrix becomes Q8_0
    silent = set(fallbacks) - set(warned)
    head = "output.weight" if "output.weight" in model.by_name else "token_embd.weight"
    assert silent <= {head}
    assert all(fallbacks[name][1] in ("Q8_0", "F16") for name in silent)


def test_a_width_that_256_does_not_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_models, "WIDTH", 288)
    source = tiny_models.write_llama(tmp_path / "source.gguf")
    model, warned = quantize(source, tmp_path / "quantized.gguf", "Q4_K_M")
    fallbacks = found(model)
    # the embeddings are also the output matrix here
    assert set(fallbacks) == set(warned) | {"token_embd.weight"}
    assert fallbacks["token_embd.weight"] == (["Q6_K"], "Q8_0")
    assert fallbacks["blk.0.ffn_up.weight"] == (["Q4_K"], "Q5_0")
    assert fallbacks["blk.1.attn_v.weight"] == (["Q6_K"], "Q8_0")
    up = next(f for f in find_fallbacks(model) if f.weight.name == "blk.0.ffn_up.weight")
    assert up.more_bytes == 288 * 64 * 5.5 / 8 - 288 * 64 * 4.5 / 8
    report = next(
        r for r in compute_inspection(model) if r.title.startswith("Types that fell back")
    )
    assert [row[0] for row in report.rows] == [w.name for w in model.weights if w.name in fallbacks]
    assert ["blk.0.ffn_up.weight", 288, "Q4_K", "Q5_0", up.more_bytes] in report.rows


def test_rows_that_32_does_not_divide_are_f16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny_models, "WIDTH", 40)
    source = tiny_models.write_llama(tmp_path / "source.gguf")
    for file_type in ("Q4_K_S", "Q8_0"):
        model, warned = quantize(source, tmp_path / f"{file_type}.gguf", file_type)
        fallbacks = found(model)
        assert set(warned) <= set(fallbacks) <= {*warned, "token_embd.weight"}
        assert fallbacks["blk.0.attn_q.weight"][1] == "F16"
        assert "blk.0.attn_norm.weight" not in fallbacks


def test_nothing_falls_back_where_nothing_was_asked_for(tmp_path: Path, demo_model: Path) -> None:
    assert find_fallbacks(load_model_file(demo_model)) == []
    # Q5_0 is the wanted type, although its rows are not a multiple of 256
    source = native_kit.random_model("llama-dense")
    model, warned = quantize(source, tmp_path / "q5_0.gguf", "Q5_0")
    assert warned == {}
    assert find_fallbacks(model) == []
    assert any(weight.type.name == "Q5_0" and weight.ne[0] % 256 for weight in model.weights)


def test_a_pure_file(tmp_path: Path) -> None:
    source = native_kit.random_model("llama-dense")
    model, warned = quantize(source, tmp_path / "pure.gguf", "--pure", "Q3_K_M")
    assert {name: has for name, (_, has) in found(model).items()} == {
        name: has for name, (_, has) in warned.items()
    }
