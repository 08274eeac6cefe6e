"""Tensors as .npz and safetensors: gguf-py's numbers, or the bytes of the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner, Result
from safetensors import safe_open

from llamacpp_instr.cli import main
from llamacpp_instr.model.file import ModelFile, Weight, load_model_file
from tests.kit.block_models import random_rows, write_blocks
from tests.weights.test_dequantize import GGUF, same

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ2_XXS", "IQ4_XS", "TQ1_0",
         "MXFP4"]  # fmt: skip
HOSTILE = "../a b/\u202e<i>"


@pytest.fixture
def model(tmp_path: Path) -> ModelFile:
    tensors = {f"{name}.weight": (name, random_rows(name, 3, 512 // 4)) for name in TYPES}
    tensors["bias"] = ("F32", np.arange(5, dtype=np.float32))
    tensors["experts"] = ("F16", np.arange(24, dtype=np.float16).reshape(2, 3, 4))
    tensors[HOSTILE] = ("F32", np.ones((2, 2), np.float32))
    return load_model_file(write_blocks(tmp_path / "model.gguf", tensors))


def export(model: ModelFile, out: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["weights", str(model.path), *options, "-o", str(out)])


def load(path: Path) -> tuple[dict[str, npt.NDArray[np.generic]], dict[str, object]]:
    """The arrays, and what the metadata has for each."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            found = dict(arrays)
        return found, json.loads(str(found.pop("__metadata__")))
    with safe_open(path, "np") as file:
        metadata = json.loads(file.metadata()["tensors"])
        return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118


def stored(weight: Weight) -> npt.NDArray[np.uint8]:
    return np.fromfile(weight.path, np.uint8, weight.n_bytes, offset=weight.offset)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_numbers_are_those_of_gguf_py(suffix: str, model: ModelFile, tmp_path: Path) -> None:
    out = tmp_path / f"w.{suffix}"
    assert export(model, out).exit_code == 0
    arrays, metadata = load(out)
    assert set(arrays) == set(metadata) == set(model.by_name)
    for weight in model.weights:
        array = arrays[weight.name]
        assert array.shape == weight.ne[::-1]
        assert metadata[weight.name] == {"type": weight.type.name, "ne": list(weight.ne)}
        wanted = GGUF.to_float(weight.type, stored(weight), weight.n_elements)
        assert same(array.ravel(), wanted), weight.name
    assert out.stat().st_mode & 0o777 == (tmp_path / "model.gguf").stat().st_mode & 0o777


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_raw_bytes_are_those_of_the_file(suffix: str, model: ModelFile, tmp_path: Path) -> None:
    out = tmp_path / f"w.{suffix}"
    assert export(model, out, "*.weight", "--raw").exit_code == 0
    arrays, metadata = load(out)
    assert len(arrays) == len(TYPES)
    for name, array in arrays.items():
        weight = model.by_name[name]
        assert array.dtype == np.uint8
        assert array.shape == (3, weight.type.row_bytes(weight.ne[0]))
        assert array.tobytes() == stored(weight).tobytes()
        assert metadata[name] == {"type": weight.type.name, "ne": list(weight.ne)}
        # gguf-py reads them unchanged
        kind = gguf.GGMLQuantizationType(weight.type.number)
        with np.errstate(all="ignore"):
            numbers = gguf.quants.dequantize(array, kind).astype(np.float32)
        assert numbers.shape == weight.ne[::-1]


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_equal_models_give_equal_files(suffix: str, model: ModelFile, tmp_path: Path) -> None:
    a, b = (tmp_path / f"{name}.{suffix}" for name in "ab")
    for path in (a, b):
        assert export(model, path).exit_code == 0
    assert a.read_bytes() == b.read_bytes()


def test_nothing_is_overwritten_and_nothing_is_left_behind(
    model: ModelFile, tmp_path: Path
) -> None:
    for suffix in ("npz", "safetensors"):
        out = tmp_path / f"w.{suffix}"
        out.write_text("mine")
        done = export(model, out)
        assert (done.exit_code, done.output.count("\n")) == (2, 1)
        assert "use --force to overwrite" in done.output
        assert out.read_text() == "mine"
        assert export(model, out, "--force").exit_code == 0
        assert load(out)[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.gguf", "w.npz", "w.safetensors",
    ]  # fmt: skip


def test_a_name_that_the_file_cannot_have_is_refused(tmp_path: Path) -> None:
    tensors = {"__metadata__": ("F32", np.ones(3, np.float32))}
    model = load_model_file(write_blocks(tmp_path / "model.gguf", tensors))
    for suffix in ("npz", "safetensors"):
        done = export(model, tmp_path / f"w.{suffix}")
        assert done.exit_code == 2
        assert "no array can have the name '__metadata__'" in done.output


@pytest.mark.native
def test_a_type_without_a_conversion_can_be_exported_raw(tmp_path: Path) -> None:
    tensors = {"t": ("Q8_K", random_rows("Q8_K", 2, 2))}
    model = load_model_file(write_blocks(tmp_path / "model.gguf", tensors))
    done = export(model, tmp_path / "w.npz")
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert "'t' is Q8_K, and ggml cannot convert" in done.output
    assert export(model, tmp_path / "w.npz", "--raw").exit_code == 0


def test_a_missing_library_is_named(
    model: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    done = export(model, tmp_path / "w.safetensors")
    assert done.exit_code == 2
    assert 'safetensors is not installed: pip install "llamacpp-instr[tensors]"' in done.output
    assert export(model, tmp_path / "w.npz").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--raw"], "--raw is for an export"),
        (["--raw", "-o", "w.json"], "--raw is for an export"),
        (["--port", "1"], "--port and --no-browser are options of --view"),
        (["--view", "-o", "w.npz"], "--view serves a page; it writes no file"),
        (["--view", "--json"], "--view serves a page; it writes no file"),
        (["--reference", "demo", "-o", "w.npz"], "an export has one model's tensors"),
        (["fnn", "-o", "w.npz"], "has no tensor 'fnn'"),
        (["-o", "nowhere/w.npz"], "there is no directory nowhere"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["weights", "demo", *words])
    assert (done.exit_code, done.output.count("\n")) == (2, 1)
    assert message in done.output
    assert list(tmp_path.iterdir()) == []
