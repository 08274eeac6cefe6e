"""`instr quantize` writes the same files as llama-quantize, and its dry run predicts them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.converters.analyses.quality import quantization_reports
from llamacpp_instr.lab.quantize.plan import (
    WRITABLE,
    QuantizeOptions,
)
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.model.file import Weight, load_model_file
from llamacpp_instr.model.types import BY_NAME
from tests.kit.native_kit import (
    random_model,
    unpatched_library,
)
from tests.kit.quantize_kit import (
    Quantized,
    importances,
    legacy_imatrix,
    llama_quantize,
    plan_quantization,
    quantize_model,
    write_imatrix,
    write_model,
)
from tests.quantize.test_quantize import SLOW_TABLES, assert_came_true, wide

__all__ = ["wide"]  # fixtures

pytestmark = pytest.mark.native
PLAIN = QuantizeOptions()
ON_DEMO = ["F16", "Q8_0", "Q4_0", "Q4_K_M", "Q2_K", "MXFP4_MOE", "TQ2_0"]


@pytest.fixture(scope="session")
def imatrix(wide: Path) -> Path:
    return write_imatrix(wide.with_name("imatrix.gguf"), importances(wide))


def quantized_alike(
    source: Path, file_type: str, folder: Path, options: QuantizeOptions = PLAIN, *flags: object
) -> Quantized:
    """Our file, which is llama-quantize's to the byte and has what was planned."""
    llama_quantize(*flags, source, folder / "theirs.gguf", file_type, 2)
    done = quantize_model(load_model_file(source), file_type, folder / "ours.gguf", options)
    assert done.path.read_bytes() == (folder / "theirs.gguf").read_bytes()
    assert_came_true(done.plan, done.path)
    return done


@pytest.mark.parametrize("file_type", ON_DEMO)
def test_the_demo_models_file_is_llama_quantizes_to_the_byte(
    demo_model: Path, tmp_path: Path, file_type: str
) -> None:
    done = quantized_alike(demo_model, file_type, tmp_path)
    assert done.path.stat().st_size == done.plan.file_bytes


def test_files_with_an_importance_matrix_are_llama_quantizes_to_the_byte(
    wide: Path, imatrix: Path, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    with Quantizer(load_model_file(wide), QuantizeOptions(imatrix=imatrix)) as quantizer:
        for file_type in (name for name in WRITABLE if name not in SLOW_TABLES):
            plan = quantizer.plan(file_type)
            quantizer.write([plan], [ours], force=True)
            llama_quantize("--imatrix", imatrix, wide, theirs, file_type, 2)
            assert ours.read_bytes() == theirs.read_bytes(), file_type
            assert_came_true(plan, ours)


def test_the_types_of_every_file_type_are_those_of_llama_quantizes_dry_run(wide: Path) -> None:
    with Quantizer(load_model_file(wide)) as quantizer:
        for file_type in WRITABLE:
            plan = quantizer.plan(file_type)
            printed = subprocess.run(
                [unpatched_library() / "llama-quantize", "--dry-run", wide, file_type],
                capture_output=True, text=True, check=True,
            ).stderr  # fmt: skip
            lines = [line for line in printed.splitlines() if line.startswith("[")]
            assert len(lines) == len(plan.tensors)
            for tensor, line in zip(plan.tensors, lines, strict=True):
                name, type_ = tensor.name, tensor.type.name.lower()
                assert f"] {name} " in line
                assert line.lower().endswith(f"({type_})") or tensor.type == tensor.weight.type
            assert plan.needs_imatrix == ("will require an imatrix" in printed), file_type


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (QuantizeOptions(pure=True), ["--pure"]),
        (QuantizeOptions(output_type=BY_NAME["Q8_0"]), ["--output-tensor-type", "q8_0"]),
        (QuantizeOptions(embedding_type=BY_NAME["F16"]), ["--token-embedding-type", "f16"]),
        (
            QuantizeOptions(
                tensor_types=[
                    (r"blk\.[0-2]\.ffn_down", BY_NAME["Q6_K"]),
                    ("ffn_", BY_NAME["IQ4_NL"]),
                ]
            ),
            ["--tensor-type", r"blk\.[0-2]\.ffn_down=q6_k", "--tensor-type", "ffn_=iq4_nl"],
        ),
    ],
)
def test_options_are_llama_quantizes(
    wide: Path, tmp_path: Path, ours: QuantizeOptions, theirs: list[str]
) -> None:
    done = quantized_alike(wide, "Q4_K_M", tmp_path, ours, *theirs)
    plain = plan_quantization(load_model_file(wide), "Q4_K_M")
    assert done.plan != plain, "the option made no difference"


def test_an_importance_matrix_of_the_older_format_is_taken_as_llama_quantize_takes_it(
    wide: Path, tmp_path: Path
) -> None:
    matrix = tmp_path / "imatrix.dat"
    matrix.write_bytes(legacy_imatrix(importances(wide)))
    options = QuantizeOptions(imatrix=matrix)
    done = quantized_alike(wide, "Q4_K_M", tmp_path, options, "--imatrix", matrix)
    assert load_model_file(done.path).metadata["quantize.imatrix.dataset"] == "words.txt"


def test_each_expert_has_importances_of_its_own(tmp_path: Path) -> None:
    experts = {"blk.0.ffn_up_exps.weight": (4, 8, 256)}
    model = write_model(tmp_path / "model.gguf", shapes=experts)
    # the last of the four experts has seen no token
    matrix = write_imatrix(tmp_path / "imatrix.gguf", importances(model), count=3)
    options = QuantizeOptions(imatrix=matrix)
    done = quantized_alike(model, "Q4_K_M", tmp_path, options, "--imatrix", matrix)
    without = quantize_model(load_model_file(model), "Q4_K_M", tmp_path / "without.gguf").path
    (ours, other) = (load_model_file(path).by_name for path in (done.path, without))
    assert read_data(ours["blk.0.ffn_up_exps.weight"]) != read_data(
        other["blk.0.ffn_up_exps.weight"]
    )


def test_a_model_in_parts_becomes_one_file(wide: Path, tmp_path: Path) -> None:
    split = unpatched_library() / "llama-gguf-split"
    subprocess.run(
        [split, "--split-max-tensors", "30", wide, tmp_path / "parts"],
        check=True, capture_output=True,
    )  # fmt: skip
    first = min(tmp_path.glob("parts-*.gguf"))
    quantized_alike(first, "Q5_K_S", tmp_path)


@pytest.mark.parametrize("architecture", ["mamba-dense", "deepseek2-moe", "gemma3-dense"])
def test_other_architectures_are_llama_quantizes_to_the_byte(
    tmp_path: Path, architecture: str
) -> None:
    quantized_alike(random_model(architecture), "Q4_K_M", tmp_path)


def test_a_quantized_model_is_quantized_again_only_when_asked(wide: Path, tmp_path: Path) -> None:
    eight = tmp_path / "eight.gguf"
    llama_quantize(wide, eight, "Q8_0", 2)
    options = QuantizeOptions(allow_requantize=True)
    done = quantized_alike(eight, "Q4_0", tmp_path, options, "--allow-requantize")
    (report,) = quantization_reports([done.plan], [done.path], written=True)
    assert report.notes == ["Quantized before: 58 tensors, whose errors add up."]


def read_data(weight: Weight) -> bytes:
    with weight.path.open("rb") as file:
        file.seek(weight.offset)
        return file.read(weight.n_bytes)
