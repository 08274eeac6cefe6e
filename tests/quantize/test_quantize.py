"""`instr quantize` writes the same files as llama-quantize, and its dry run predicts them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.lab.quantize.plan import (
    ALIASES,
    WRITABLE,
    QuantizationPlan,
    quantized_name,
)
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.llama.native import import_llama_cpp
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import BY_NAME
from tests.conftest import Instr
from tests.kit.in_process import titled
from tests.kit.native_kit import (
    compile_program,
    installed_library,
)
from tests.kit.quantize_kit import (
    plan_quantization,
    quantize_model,
    write_model,
)

pytestmark = pytest.mark.native
SLOW_TABLES = {"IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ2_S", "IQ2_M", "IQ1_M"}
"""file types for which ggml computes tables, which takes seconds in every process"""


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rows are divisible into the blocks of all types."""
    return write_model(tmp_path_factory.mktemp("wide") / "wide-f32.gguf")


def test_what_falls_back_is_named_with_the_type_that_it_would_have(
    wide: Path, tmp_path: Path
) -> None:
    narrow = load_model_file(write_model(tmp_path / "narrow.gguf", 96))
    n_fallbacks = 0
    with Quantizer(load_model_file(wide)) as meant, Quantizer(narrow) as quantizer:
        for file_type in (name for name in WRITABLE if name != "Q1_0"):
            plan = quantizer.plan(file_type)
            wanted = {tensor.name: tensor.type for tensor in meant.plan(file_type).tensors}
            for tensor in plan.tensors:
                assert (tensor.fallback_from or tensor.type) == wanted[tensor.name], file_type
            n_fallbacks += len(plan.fallbacks)
            if not plan.needs_imatrix and file_type not in SLOW_TABLES:
                output = tmp_path / f"{file_type}.gguf"
                quantizer.write([plan], [output])
                assert_came_true(plan, output)
    assert n_fallbacks > 20 * 8 * 7


def test_embeddings_that_are_the_output_fall_back_too(tmp_path: Path) -> None:
    for width, expected in ((256, ("Q6_K", None)), (96, ("Q8_0", "Q6_K"))):
        source = load_model_file(write_model(tmp_path / f"{width}.gguf", width, tied=True))
        plan = plan_quantization(source, "Q4_K_M")
        (tensor,) = (tensor for tensor in plan.tensors if tensor.name == "token_embd.weight")
        assert (
            tensor.type.name,
            tensor.fallback_from and tensor.fallback_from.name,
        ) == expected


def test_rows_that_no_block_divides_become_f16(tmp_path: Path) -> None:
    odd = load_model_file(write_model(tmp_path / "odd.gguf", 40))
    done = quantize_model(odd, "Q4_K_M", tmp_path / "out.gguf")
    (tensor,) = (tensor for tensor in done.plan.tensors if tensor.name == "blk.0.ffn_up.weight")
    assert (tensor.type.name, tensor.fallback_from) == ("F16", BY_NAME["Q4_K"])
    assert_came_true(done.plan, done.path)


def test_progress_is_reported_in_weights(wide: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = load_model_file(wide)
    quantize_model(
        source, "Q8_0", tmp_path / "out.gguf", on_progress=lambda *counts: seen.append(counts)
    )
    assert len(seen) == len(source.weights)
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {source.n_elements}


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


def test_a_file_is_named_after_its_source_without_that_ones_type(
    instr: Instr, wide: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    assert instr("quantize", wide, "--types", "Q4_1", "-o", "out").returncode == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["wide-Q4_1.gguf"]
    assert instr("quantize", wide, "--types", "Q4_1", "-o", "mine.gguf").returncode == 0
    assert (tmp_path / "mine.gguf").is_file()


def test_a_dry_run_writes_nothing_and_knows_every_file_type(instr: Instr, tmp_path: Path) -> None:
    types = [*WRITABLE, *ALIASES]
    done = instr("quantize", "demo", "--types", ",".join(types), "--dry-run", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    sizes = titled(json.loads(done.stdout))[0]
    assert sizes["units"]["bytes"] == "count"
    assert [file["type"] for file in sizes["rows"]] == list(WRITABLE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("tiny-F16.gguf", "tiny-Q4_0.gguf"),
        ("Tiny.bf16.gguf", "Tiny-Q4_0.gguf"),
        ("tiny-q4_k_m.gguf", "tiny-Q4_0.gguf"),
        ("tiny-Q4_K.gguf", "tiny-Q4_0.gguf"),
        ("tiny-F16-00001-of-00003.gguf", "tiny-Q4_0.gguf"),
        ("tiny-f16-chat.gguf", "tiny-f16-chat-Q4_0.gguf"),
        ("F16.gguf", "F16-Q4_0.gguf"),
        ("tiny", "tiny-Q4_0.gguf"),
    ],
)
def test_names_of_files(source: str, name: str) -> None:
    assert quantized_name(Path("somewhere", source), "Q4_0") == name


def test_names_of_a_model_do_nothing_to_the_terminal(instr: Instr, tmp_path: Path) -> None:
    name = "blk.0.\x1b[2Jffn_up.weight"
    write_model(tmp_path / "model.gguf", shapes={name: (8, 96)})
    done = instr("quantize", "model.gguf", "--types", "Q4_K_M", "--dry-run")
    assert "\x1b" not in done.stdout
    assert r"blk.0.\x1b[2Jffn_up" in done.stdout
    done = instr("quantize", "model.gguf", "--types", "Q4_K_M", "--dry-run", "--json")
    assert name in [tensor["tensor"] for tensor in titled(json.loads(done.stdout))[-1]["rows"]]


def test_a_dry_run_lists_what_falls_back(instr: Instr, models: Path) -> None:
    done = instr("quantize", models / "llama.gguf", "--types", "Q4_K_M,Q1_0", "--dry-run")
    assert done.returncode == 2, "no type is defined to fall back to from Q1_0"
    done = instr("quantize", models / "llama.gguf", "--types", "Q4_K_M", "--dry-run")
    assert "Q4_K_M  Q4_K   Q5_0       12  32, 64      blk.0.attn_k.weight" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_structures_of_ctypes_are_those_of_the_header(tmp_path: Path) -> None:
    lib = import_llama_cpp().llama_cpp
    names = (
        "llama_model_quantize_params", "llama_model_imatrix_data", "llama_model_tensor_override",
    )  # fmt: skip
    expected = []
    lines = []
    for name in names:
        structure = getattr(lib, name)
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append((name, lib.ctypes.sizeof(structure)))
        for field, _ in structure._fields_:
            expected.append((field, getattr(structure, field).offset))
            lines.append(f'printf("{field} %zu\\n", offsetof({name}, {field}));')
    # its union has no name there, its members follow the key
    lines.append('printf("value %zu\\n", offsetof(llama_model_kv_override, val_str));')
    expected.append(("value", lib.llama_model_kv_override.value.offset))
    source = tmp_path / "layout.cpp"
    source.write_text(
        "#include <cstddef>\n#include <cstdio>\n#include <llama.h>\n"
        f"int main() {{ {' '.join(lines)} }}\n"
    )
    program = compile_program(source, installed_library(), tmp_path)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    found = [line.split() for line in printed.splitlines()]
    assert [(name, int(offset)) for name, offset in found] == expected


def assert_came_true(plan: QuantizationPlan, path: Path) -> None:
    written = load_model_file(path)
    assert written.file_type == plan.file_type
    assert written.file_size == plan.file_bytes
    assert written.n_bytes == plan.n_bytes
    assert [(weight.name, weight.type) for weight in written.weights] == [
        (tensor.name, tensor.type) for tensor in plan.tensors
    ]
