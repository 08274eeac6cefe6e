"""`instr inspect`: every number is gguf-py's, every total the file's, from headers alone."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import pytest

from llamacpp_instr.converters.analyses.inspect import compute_inspection, compute_tensors
from llamacpp_instr.model.file import ModelFile, load_any_file, load_model_file
from llamacpp_instr.report.render import render_text
from llamacpp_instr.report.report import Cell, Report
from tests.conftest import Instr, assert_refused
from tests.kit import native_kit, projectors
from tests.kit.adapters import new_adapter
from tests.kit.gguf_files import save, split_model
from tests.kit.in_process import json_reports, printed
from tests.kit.quantized_kit import quantized_demo
from tests.kit.reports import by_title, rows
from tests.kit.sparse_models import write_large_header

SOME_MODELS = (
    "llama-dense", "llama-moe", "falcon-dense", "mamba-dense", "qwen3next-moe", "gemma3-dense",
    "deepseek2-moe", "gpt-oss-moe", "granitehybrid-dense", "minimax-01-moe", "plamo2-dense",
    "lfm2-dense",
)  # fmt: skip


def reports(model: ModelFile) -> dict[str, Report]:
    return by_title(compute_inspection(model))


def facts(report: Report) -> dict[Cell, Cell]:
    return {row[0]: row[1] for row in report.rows}


def assert_true(model: ModelFile, theirs: list[gguf.GGUFReader]) -> None:
    """Checks that every number is what gguf-py reads from the model's files."""
    tensors = [tensor for reader in theirs for tensor in reader.tensors]
    assert [
        (row["Tensor"], row["type"], row["shape"], row["elements"], row["bytes"], row["offset"])
        for row in rows(compute_tensors(model))
    ] == [
        (t.name, t.tensor_type.name, " x ".join(map(str, t.shape)), t.n_elements, t.n_bytes,
         t.data_offset)
        for t in tensors
    ]  # fmt: skip
    n_bytes, count = Counter[str](), Counter[str]()
    for tensor in tensors:
        n_bytes[tensor.tensor_type.name] += int(tensor.n_bytes)
        count[tensor.tensor_type.name] += 1
    shown = reports(model)
    types = rows(shown["Types"])
    assert {row["Type"]: row["bytes"] for row in types} == n_bytes
    assert {row["Type"]: row["tensors"] for row in types} == count
    total = sum(n_bytes.values())
    for title in ("Types", "Roles", "Layers"):
        parts = rows(shown[title])
        assert sum(row["bytes"] for row in parts) == total
        assert sum(row["tensors"] for row in parts) == len(tensors)
        assert sum(row["share"] for row in parts) == pytest.approx(1)
    found = facts(shown["Model"])
    elements = sum(int(tensor.n_elements) for tensor in tensors)
    assert (found["parameters"], found["tensors"]) == (elements, len(tensors))
    assert found["bits per weight"] == pytest.approx(8 * total / elements, abs=1e-4)
    assert found["bytes of the weights"] == total
    assert found["bytes of headers"] == sum(reader.data_offset for reader in theirs)
    assert found["bytes in all"] == sum(reader.data.size for reader in theirs)
    parts = [int(str(found[f"bytes of {of}"])) for of in ("the weights", "headers", "padding")]
    assert sum(parts) == found["bytes in all"]
    assert parts[-1] >= 0
    fields = theirs[0].fields
    for row in rows(shown.get("Hyper-parameters", Report("", [], []))):
        prefixes = (model.architecture, model.metadata.get("general.type"))
        (value,) = (
            fields[key].contents()
            for key in {f"{prefix}.{row['key']}" for prefix in prefixes}
            if key in fields
        )
        if isinstance(value, list):
            assert str(row["value"]).startswith(f"{len(value):,} values")
        elif isinstance(value, bool):
            assert row["value"] == ("yes" if value else "no")
        elif isinstance(value, float):
            assert float(str(row["value"])) == pytest.approx(value)
        else:
            assert row["value"] == value


def test_the_demo_model(demo_model: Path) -> None:
    assert_true(load_model_file("demo"), [gguf.GGUFReader(demo_model)])


@pytest.mark.native
@pytest.mark.parametrize("name", SOME_MODELS)
def test_models_of_many_architectures(name: str) -> None:
    path = native_kit.random_model(name)
    model = load_model_file(path)
    assert_true(model, [gguf.GGUFReader(path)])
    assert reports(model)["Model"].notes == [], "no contradiction"
    text = render_text([*compute_inspection(model), compute_tensors(model)])
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.native
def test_a_split_model(tmp_path: Path, demo_model: Path) -> None:
    parts = split_model(demo_model, tmp_path / "demo", tensors=15)
    model = load_model_file(parts[0])
    assert_true(model, [gguf.GGUFReader(part) for part in parts])
    assert facts(reports(model)["Model"])["parts"] == 3
    whole = reports(load_model_file(demo_model))
    for title in ("Types", "Layers", "Tokenizer"):
        assert reports(model)[title] == whole[title]
    assert {row["part"] for row in rows(compute_tensors(model))} == {part.name for part in parts}


@pytest.mark.native
@pytest.mark.parametrize("name", ["Q4_K_M", "IQ4_XS", "Q8_0"])
def test_files_of_llama_quantize(name: str) -> None:
    """Made from the demo model, whose rows are multiples of 256."""
    model = load_model_file(quantized_demo(name))
    assert_true(model, [gguf.GGUFReader(quantized_demo(name))])
    shown = reports(model)
    assert facts(shown["Model"])["file type"] == name
    assert "Types that fell back because of the row length" not in shown
    assert any("No tensor fell back" in note for note in shown["Types"].notes)


@pytest.mark.native
def test_bits_per_weight_by_hand() -> None:
    report = compute_tensors(load_model_file(quantized_demo("Q4_K_M")))
    tensors = {row["Tensor"]: row for row in rows(report)}
    up = tensors["blk.0.ffn_up.weight"]
    assert (up["type"], up["bits/weight"], up["bytes"]) == ("Q4_K", 4.5, 256 * 768 // 256 * 144)
    assert tensors["output.weight"]["bits/weight"] == 6.5625
    assert tensors["output_norm.weight"]["bits/weight"] == 32


def test_the_tokenizer_is_gguf_pys(demo_model: Path) -> None:
    fields = gguf.GGUFReader(demo_model).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    report = reports(load_model_file(demo_model))["Tokenizer"]
    found = facts(report)
    assert found["tokens"] == len(tokens)
    for name in ("bos", "eos", "unknown"):
        number = fields[f"tokenizer.ggml.{name}_token_id"].contents()
        assert [f"{name} token", number, tokens[number]] in report.rows
    template = fields["tokenizer.chat_template"].contents()
    assert ["chat template", "yes", f"{len(template):,} characters"] in report.rows


def test_a_vocabulary_without_weights(instr: Instr, models: Path) -> None:
    done = instr("inspect", models / "vocabulary.gguf")
    assert done.returncode == 0, done.stderr
    assert "a vocabulary without weights" in done.stdout
    assert "tokens         64" in done.stdout
    assert "Types" not in done.stdout


def test_a_token_that_is_not_in_the_vocabulary(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b"])
    writer.add_eos_token_id(7)
    save(writer)
    report = reports(load_model_file(tmp_path / "model.gguf"))["Tokenizer"]
    assert ["eos token", 7, "not in the vocabulary"] in report.rows


def test_without_a_file_type_nothing_is_said_of_fallbacks(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((4, 22 * 12), np.uint8),
                      raw_dtype=gguf.GGMLQuantizationType.Q5_0)  # fmt: skip
    save(writer)
    shown = reports(load_model_file(tmp_path / "model.gguf"))
    assert facts(shown["Model"])["file type"] == "not stated"
    (note,) = shown["Types"].notes
    assert "cannot be detected" in note


def test_a_lora_adapter(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "adapter.gguf", "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 16)
    for name, shape in (("lora_a", (8, 64)), ("lora_b", (128, 8))):
        writer.add_tensor(f"blk.3.attn_q.weight.{name}", np.zeros(shape, np.float16))
    save(writer)
    model = load_any_file(tmp_path / "adapter.gguf")
    assert_true(model, [gguf.GGUFReader(tmp_path / "adapter.gguf")])
    assert facts(reports(model)["Model"])["kind"] == "adapter"
    assert reports(model)["Model"].notes == []
    found = facts(reports(model)["Hyper-parameters"])
    assert found == {"type": "lora", "lora.alpha": 16}
    assert facts(reports(model)["Adapter"]) == {
        "for models of": "llama", "rank": "8", "alpha": 16, "weights changed": 1,
        "layers changed": 1,
    }  # fmt: skip
    explained = {row["fact"]: row["explained"] for row in rows(reports(model)["Adapter"])}
    assert explained["alpha"] == "adds 2 times B A x, times the scale of the run"
    assert explained["weights changed"] == "attn_q"
    assert {row["Role"] for row in rows(reports(model)["Roles"])} == {
        "attn_q.lora_a", "attn_q.lora_b"
    }  # fmt: skip


def test_an_adapter_with_several_ranks(demo_model: Path, tmp_path: Path) -> None:
    writer = new_adapter(tmp_path / "adapter.gguf", "llama", alpha=0)
    for i, rank in enumerate((8, 4, 8)):
        for name, shape in (("lora_a", (rank, 64)), ("lora_b", (128, rank))):
            writer.add_tensor(f"blk.{i}.ffn_up.weight.{name}", np.zeros(shape, np.float16))
    save(writer)
    found = facts(reports(load_any_file(tmp_path / "adapter.gguf"))["Adapter"])
    assert (found["rank"], found["weights changed"], found["layers changed"]) == ("4, 8", 3, 3)
    assert "Adapter" not in reports(load_model_file(demo_model))


def test_a_multimodal_projector(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("mlp")
    writer.add_vision_block_count(2)
    writer.add_vision_head_count(4)
    for name in ("v.patch_embd", "v.blk.0.attn_q", "v.blk.1.attn_q", "mm.0"):
        writer.add_tensor(f"{name}.weight", np.zeros((64, 64), np.float16))
    save(writer)
    model = load_any_file(tmp_path / "mmproj.gguf")
    assert_true(model, [gguf.GGUFReader(tmp_path / "mmproj.gguf")])
    assert facts(reports(model)["Model"])["kind"] == "mmproj"
    assert [row["Layer"] for row in rows(reports(model)["Layers"])] == [0, 1, -1]
    assert facts(reports(model)["Hyper-parameters"])["vision.block_count"] == 2
    assert facts(reports(model)["Projector"]) == {
        "reads": "images", "projector": "mlp", "layers": 2, "attention heads": 4
    }  # fmt: skip


def test_a_projector_says_what_it_reads_and_gives(tmp_path: Path) -> None:
    model = load_any_file(projectors.write_projector(tmp_path / "mmproj.gguf", 256))
    assert facts(reports(model)["Projector"]) == {
        "reads": "images", "projector": "mlp", "image size (pixels)": projectors.SIZE,
        "patch size (pixels)": projectors.PATCH, "layers": projectors.LAYERS,
        "embedding width": projectors.WIDTH, "feed-forward width": projectors.FEED_FORWARD,
        "attention heads": projectors.HEADS, "width for the model": 256,
        "patches of an image": projectors.TOKENS,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "at", "value", "words"),
    [
        ("b", 20, 77, "tensor 'b' has the storage type 77"),
        ("b", 24, 2048, "'b' begins 2,048 bytes into the data, where llama.cpp expects 1,024"),
        ("a", 24, 2048, "'a' begins 2,048 bytes into the data, where llama.cpp expects 0"),
        ("", 0, 0, "'llama.nested' is an array of arrays"),
    ],
    ids=["type", "gap", "order", "nested"],
)
def test_what_llama_cpp_cannot_load_is_shown_with_the_reason(
    tmp_path: Path, instr: Instr, name: str, at: int, value: int, words: str
) -> None:
    """A later storage type, a gap between tensors, another order of their data: each is a
    number in a tensor's entry, after its name."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if not name:
        writer.add_array("llama.nested", [["a", "b"], ["c"]])
    for tensor in ("a", "b"):
        writer.add_tensor(tensor, np.zeros((8, 32), np.float32))
    save(writer)
    if name:
        content = bytearray(path.read_bytes() + bytes(2048))
        entry = content.index(struct.pack("<Q", 1) + name.encode()) + 9
        struct.pack_into("<I", content, entry + at, value)
        path.write_bytes(content)
    done = instr("inspect", path, "--tensors")
    assert done.returncode == 0, done.stderr
    found = " ".join(done.stdout.split())
    assert "llama.cpp cannot load this file: " in found
    assert words in found
    assert "a F32 32 x 8 256" in found
    assert ("counted as padding" in found) is (value == 77)
    assert ("2 values, 1 values" in found) is (not name)
    assert_refused(instr("memory", path), words)


NUMBERS = {
    "block_count": 2, "embedding_length": 64, "vocab_size": 5,
    "attention.head_count": 4, "attention.head_count_kv": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("block_count", 3, "block_count is 3, but the file has 2 layers"),
        ("embedding_length", 128, "embedding_length is 128, but the file has 64 columns"),
        ("vocab_size", 6, "vocab_size is 6, but the file has 5 tokens"),
        ("attention.head_count_kv", 1, "head_count_kv is 1, but the file has 2 heads"),
        ("attention.head_count", 5, "head_count_kv is 2 and does not divide 5 heads"),
        ("tokens", 4, "the number of tokens is 4, but the file has 5 embeddings"),
    ],
)
def test_what_the_header_contradicts_is_pointed_out(
    tmp_path: Path, key: str, value: int, words: str
) -> None:
    def notes(name: str, numbers: dict[str, int]) -> list[str]:
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        for of, number in numbers.items():
            if of != "tokens":
                writer.add_uint32(f"llama.{of}", number)
        writer.add_token_list([f"{i}" for i in range(numbers.get("tokens", 5))])
        writer.add_tensor("token_embd.weight", np.zeros((5, 64), np.float32))
        for layer in range(2):
            writer.add_tensor(f"blk.{layer}.attn_k.weight", np.zeros((32, 64), np.float32))
        save(writer)
        return reports(load_model_file(tmp_path / name))["Model"].notes

    assert notes("good.gguf", NUMBERS) == []
    assert any(words in note for note in notes("bad.gguf", NUMBERS | {key: value}))


# --- the command ---


def test_every_form(demo_model: Path) -> None:
    text = printed("inspect", "demo")
    assert "Roles" in text
    assert "blk.0.attn_q.weight" not in text
    assert printed("inspect", demo_model, "--tensors").count("blk.0.attn_q.weight") == 1
    found = json_reports("inspect", "demo")
    assert [report["title"] for report in found] == [
        "Model", "Hyper-parameters", "Tokenizer", "Types", "Roles", "Layers", "Tensors",
    ]  # fmt: skip
    assert found[-1]["units"]["bytes"] == "bytes"
    csv = printed("inspect", "demo", "--csv").splitlines()
    assert csv[0].startswith("Tensor,type,shape,elements,bytes,bits/weight,layer,role")
    assert csv[1].startswith("token_embd.weight,F16,256 x 1024,262144,524288,16.0,-1,token_embd")
    assert len(csv) == 1 + 39
    assert "| F16 | 30 |" in printed("inspect", "demo", "--md")
    assert "<td>blk.0.attn_q.weight</td>" in printed("inspect", "demo", "--html")


def test_what_is_no_model(instr: Instr, tmp_path: Path, demo_model: Path) -> None:
    assert_refused(instr("inspect", "missing.gguf"), "missing.gguf does not exist")
    (tmp_path / "cut.gguf").write_bytes(demo_model.read_bytes()[:3000])
    assert_refused(instr("inspect", "cut.gguf"), "cut.gguf is truncated")


def test_reading_costs_no_memory_however_large_the_file(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    path = tmp_path / "large.gguf"
    names = ("attn_q", "attn_k", "attn_v", "attn_output")
    write_large_header(path, 40, [f"blk.{i}.{of}.weight" for i in range(40) for of in names], 8192)
    assert path.stat().st_size > 20 << 30
    code = (
        "import sys\n"
        "from llamacpp_instr.cli import main\n"
        "try: main(['inspect', sys.argv[1]])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'pandas', 'gguf', 'matplotlib', 'llama_cpp'} & set(sys.modules)\n"
        "peak = next(l for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "print('PEAK', int(peak.split()[1]), sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], env=environment, capture_output=True, text=True
    )
    peak, heavy = done.stdout.rpartition("PEAK ")[2].split(maxsplit=1)
    assert int(peak) * 1024 < 50e6
    assert heavy == "[]\n"
