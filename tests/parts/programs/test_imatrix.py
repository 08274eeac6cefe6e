"""`instr imatrix` computes the file that llama-imatrix computes from the same text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.conftest import Instr
from tests.kit import tiny_models
from tests.kit.llama_programs import programs
from tests.kit.native_kit import DEMO, random_model, smollm2
from tests.run.test_imatrix import TEXT, tensors_of

pytestmark = pytest.mark.native


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def computed(
    instr: Instr, model: Path, text: Path, chunks: int, ctx: int = 512, batch: int = 2048
) -> tuple[gguf.GGUFReader, gguf.GGUFReader]:
    """Our matrix, and llama-imatrix's, which computes `batch` tokens of several chunks at once."""
    theirs, both = text.with_name("theirs.gguf"), ("--chunks", str(chunks), "--threads", "1")
    command = [programs() / "llama-imatrix", "-m", model, "-f", text, "-o", theirs, "--no-ppl"]
    subprocess.run(
        [*command, "-c", str(ctx), "-b", str(batch), *both], check=True, capture_output=True
    )
    given = ("--ctx", ctx, "--batch", min(batch, ctx), *both)
    done = instr("imatrix", model, "--text", text, "-o", "ours.gguf", *given)
    assert done.returncode == 0, done.stderr
    return gguf.GGUFReader(text.with_name("ours.gguf")), gguf.GGUFReader(theirs)


def assert_equal(ours: gguf.GGUFReader, theirs: gguf.GGUFReader) -> None:
    """The counts exactly, the sums within rounding: llama-imatrix adds up float32."""
    facts, others = ({k: f.contents() for k, f in of.fields.items()} for of in (ours, theirs))
    assert facts == others
    expected = tensors_of(theirs)
    assert sorted(tensors_of(ours)) == sorted(expected)
    for name, values in tensors_of(ours).items():
        if name.endswith(".counts"):
            assert values.tolist() == expected[name].tolist(), name
        else:
            assert values == pytest.approx(expected[name], rel=1e-4), name


def test_that_of_a_real_model(instr: Instr, text: Path) -> None:
    assert_equal(*computed(instr, smollm2(), text, chunks=3, ctx=64))


# experts of three kinds; weights of three dimensions (latent attention); recurrent; diffusion
@pytest.mark.parametrize(
    "name",
    ["llama-moe", "qwen2moe-moe", "gpt-oss-moe", "deepseek2-moe", "jamba-dense", "llada-dense"],
)
def test_that_of_other_architectures(instr: Instr, text: Path, name: str) -> None:
    model = random_model(name)
    assert_equal(*computed(instr, model, text, chunks=2, ctx=128))


def test_the_demo_models_matrix_is_llama_imatrixs(instr: Instr, text: Path) -> None:
    assert_equal(*computed(instr, DEMO, text, chunks=2))


@pytest.mark.parametrize("batch", [64, 128])
def test_parts_of_a_chunk_add_up_to_it(instr: Instr, text: Path, batch: int) -> None:
    """llama-imatrix leaves out a part of less than 16 rows, which this never makes."""
    assert_equal(*computed(instr, DEMO, text, chunks=2, ctx=128, batch=batch))
    done = instr("imatrix", "demo", "--text", text, "-o", "odd.gguf", "--ctx", 65, "--batch", 64)
    assert done.returncode == 0, done.stderr
    odd = gguf.GGUFReader(text.with_name("odd.gguf"))
    counts = {int(of[0]) for name, of in tensors_of(odd).items() if name.endswith(".counts")}
    chunks = odd.fields["imatrix.chunk_count"].contents()
    assert counts == {65 * chunks}


def test_each_expert_has_the_sums_of_its_own_tokens(instr: Instr, text: Path) -> None:
    model = tiny_models.write_experts(text.with_name("experts.gguf"), experts=32, used=2)
    ours, theirs = computed(instr, model, text, chunks=2, ctx=32)
    assert_equal(ours, theirs)
    counts = tensors_of(ours)["blk.0.ffn_up_exps.weight.counts"]
    assert counts.sum() == 2 * 64
    assert 0 < np.count_nonzero(counts == 0) < 31
    done = instr("inspect", "ours.gguf")
    assert "Never reached" in done.stdout, "experts that no token used are named"


def test_that_of_an_encoder(instr: Instr, models: Path, text: Path) -> None:
    assert_equal(*computed(instr, models / "bert.gguf", text, chunks=2, ctx=64))
