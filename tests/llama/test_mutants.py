"""A model file that lacks or claims something runs, or is refused in one line."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest

from llamacpp_instr.llama import native
from llamacpp_instr.model.types import NOT_COMPUTED, TYPES
from tests.conftest import Instr, assert_refused
from tests.kit import tiny_models
from tests.kit.mutants import (
    F32,
    I32,
    U8,
    Entries,
    N,
    array,
    number,
    text,
    texts,
    vocabulary,
    write_mutant,
)

pytestmark = pytest.mark.native
TOKENS = vocabulary()
NAMELESS = [f"[{i}]" for i in range(N)]
NO_BYTES = [f"[{i}]" if token.startswith("<0x") else token for i, token in enumerate(TOKENS)]
REFUSED: dict[str, Entries] = {
    "no tokens for bytes": {"tokens": texts(NO_BYTES)},
    "no tokens for bytes, and no types": {"tokens": texts(NO_BYTES), "token_type": b""},
    "no token for any letter": {"tokens": texts(NAMELESS)},
    "empty tokens": {"tokens": texts([""] * N)},
    "tokens that are equal": {"tokens": texts(["a"] * N)},
    "too few tokens": {"tokens": texts(TOKENS[:500])},
    "too many tokens": {"tokens": texts([*TOKENS, "one", "more"])},
    "no tokens": {"tokens": texts([])},
    "tokens that are lacking": {"tokens": b""},
    "tokens that are numbers": {"tokens": array([1] * N, I32)},
    "too few scores": {"scores": array([0.0] * 3, F32)},
    "too few types": {"token_type": array([1] * 3, I32)},
    "types that are floats": {"token_type": array([1.0] * N, F32)},
    "tokens that are all bytes": {"token_type": array([6] * N, I32)},
    "an unknown tokenizer": {"model": text("abacus")},
    "BPE without merges": {"model": text("gpt2")},
    "BPE with merges that are numbers": {"model": text("gpt2"), "merges": array([1], I32)},
    "WPM without its tokens": {"model": text("bert")},
    "PLaMo-2 without bytes": {"model": text("plamo2"), "tokens": texts(NAMELESS)},
    "UGM with a wrong map": {
        "model": text("t5"), "precompiled_charsmap": array([0, 4, 0, 0] + [255] * 2000, U8),
    },
    "a BOS that is a text": {"bos_token_id": text("a")},
    "add_bos that is a number": {"add_bos_token": number(7)},
}  # fmt: skip


def run(instr: Instr, model: Path, *options: object) -> tuple[int, str]:
    """The exit status and standard error; a crash or a traceback fails the test."""
    prompt = ("-p", "hello Wörld\n 1", "-n", 2)
    done = instr("run", model, *prompt, "--level", "minimal", "--threads", 1, *options)
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_vocabulary_is_one_line(instr: Instr, tmp_path: Path, name: str) -> None:
    model = write_mutant(tmp_path / "mutant.gguf", REFUSED[name])
    status, error = run(instr, model)
    assert status == 2
    assert error.startswith(f"Error: {model}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["mutant.gguf"]


@pytest.mark.parametrize("tensor", ["token_embd.weight", "blk.1.attn_q.weight"])
@pytest.mark.parametrize(
    ("dtype", "name"), [(np.int8, "I8"), (np.int32, "I32"), (np.int64, "I64"), (np.float64, "F64")]
)
def test_weights_that_cannot_be_computed_with_are_refused(
    instr: Instr, tmp_path: Path, tensor: str, dtype: type, name: str
) -> None:
    tiny_models.write_llama(tmp_path / "odd.gguf", dtypes={tensor: dtype})
    done = instr("run", "odd.gguf", "-p", "hello")
    assert_refused(done, f"odd.gguf: tensor {tensor!r} is {name}, with which llama.cpp cannot")
    assert [path.name for path in tmp_path.iterdir()] == ["odd.gguf"]


def test_a_norm_that_cannot_be_computed_with_is_one_line(instr: Instr, tmp_path: Path) -> None:
    tiny_models.write_llama(tmp_path / "odd.gguf", dtypes={"output_norm.weight": np.float16})
    done = instr("run", "odd.gguf", "-p", "hello")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "odd.gguf, recorded in session.log: llama.cpp ended the process: " in line


def test_the_types_are_those_that_the_library_cannot_multiply() -> None:
    class Traits(ctypes.Structure):
        """`struct ggml_type_traits_cpu` (ggml-cpu.h)."""

        _fields_ = (("from_float", ctypes.c_void_p), ("vec_dot", ctypes.c_void_p))

    of_type = native.load().lib.ggml_get_type_traits_cpu
    of_type.restype, of_type.argtypes = ctypes.POINTER(Traits), [ctypes.c_int]
    without = {type_.name for type_ in TYPES.values() if not of_type(type_.number).contents.vec_dot}
    assert without == NOT_COMPUTED


def test_the_mutant_of_nothing_is_the_demo_model(tmp_path: Path, demo_model: Path) -> None:
    ours, theirs = (
        gguf.GGUFReader(path) for path in (write_mutant(tmp_path / "same.gguf", {}), demo_model)
    )
    for key, field in theirs.fields.items():
        assert ours.fields[key].contents() == field.contents()
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (one.name, one.data.tobytes()) == (other.name, other.data.tobytes())
