"""The error of models' weights, from their files."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.weights import measure
from llamacpp_instr.lab.weights.figures import CHUNK, Sums, WeightError
from llamacpp_instr.lab.weights.measure import PIECE, compute_weight_errors
from llamacpp_instr.model.file import Weight, load_model_file
from tests.kit.block_models import write_blocks
from tests.kit.native_kit import ROOT
from tests.kit.programs import run_python
from tests.kit.quantized_kit import quantized_demo
from tests.kit.sparse_models import write_with_more_rows
from tests.kit.tiny_models import write_llama

Tensors = dict[str, npt.NDArray[np.float32]]
Q8_0 = gguf.GGMLQuantizationType.Q8_0
RANDOM = np.random.default_rng(3)


def write_plain(path: Path, tensors: Tensors, architecture: str = "llama") -> Path:
    """A model with these tensors, all F32."""
    of_f32 = {name: ("F32", values) for name, values in tensors.items()}
    return write_blocks(path, of_f32, architecture)


def write_model(path: Path, tensors: Tensors) -> Path:
    """The same, 2-D ones as Q8_0."""
    stored = {
        name: ("Q8_0", gguf.quants.quantize(values, Q8_0))
        if values.ndim == 2 and values.shape[1] % 32 == 0
        else ("F32", values)
        for name, values in tensors.items()
    }
    return write_blocks(path, stored)


def random(*shape: int) -> npt.NDArray[np.float32]:
    return RANDOM.normal(size=shape).astype(np.float32)


def errors_of(reference: Path | str, candidate: Path | str, **options: int) -> list[WeightError]:
    return compute_weight_errors(load_model_file(reference), load_model_file(candidate), **options)


def gguf_py_numbers(weight: Weight) -> npt.NDArray[np.float64]:
    stored = np.fromfile(weight.path, np.uint8, weight.n_bytes, offset=weight.offset)
    kind = gguf.GGMLQuantizationType(weight.type.number)
    return gguf.quants.dequantize(stored, kind).astype(np.float64)


@pytest.mark.native
@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_K_M", "Q2_K", "IQ4_XS"])
def test_the_demo_model_against_gguf_py(file_type: str) -> None:
    reference, candidate = load_model_file("demo"), load_model_file(quantized_demo(file_type))
    errors = compute_weight_errors(reference, candidate)
    assert len(errors) == len(candidate.weights) == len(reference.weights)
    for error, weight in zip(errors, candidate.weights, strict=True):
        original = reference.by_name[weight.name]
        x, y = gguf_py_numbers(original), gguf_py_numbers(weight)
        assert (error.name, error.type, error.reference_type) == (
            weight.name,
            weight.type,
            original.type,
        )
        assert error.n_bytes == weight.n_bytes
        assert error.sums.n == error.n_elements == x.size
        difference = np.abs(x - y)
        assert error.rmse == pytest.approx(math.sqrt(np.mean(difference**2)), rel=1e-5)
        assert error.max_error == pytest.approx(difference.max(), rel=1e-6)
        cosine = x @ y / math.sqrt(x @ x) / math.sqrt(y @ y)
        assert error.cosine == pytest.approx(cosine, abs=1e-7)
        if error.rmse:
            sqnr = 10 * math.log10(x @ x / (difference @ difference))
            assert error.sqnr_db == pytest.approx(sqnr, abs=1e-4)
        else:
            assert error.sqnr_db == math.inf
        wanted = np.percentile(difference, [50, 90, 99, 99.9])
        assert (error.p50, error.p90, error.p99, error.p999) == pytest.approx(
            tuple(wanted), rel=1e-5
        )
        block = error.type.block if error.type.is_quantized else 256
        if x.size % block == 0:
            blocks = np.sqrt(np.mean(difference.reshape(-1, block) ** 2, axis=1))
            assert error.worst_block == blocks.argmax()
            assert error.worst_block_rmse == pytest.approx(blocks.max(), rel=1e-5)


@pytest.mark.native
def test_more_bits_err_less() -> None:
    ladder = ["F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M", "Q2_K"]
    totals = []
    for file_type in ladder:
        errors = errors_of("demo", quantized_demo(file_type))
        totals.append(sum((error.sums for error in errors), start=Sums()).sqnr_db)
    assert totals[0] == math.inf, "the demo model is F16 itself"
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)


@pytest.mark.native
def test_a_model_against_itself_has_no_error() -> None:
    for file_type in ("Q4_K_M", "IQ4_XS"):
        path = quantized_demo(file_type)
        for error in errors_of(path, path):
            assert (error.rmse, error.max_error, error.p999, error.non_finite) == (0, 0, 0, 0)
            assert (error.sqnr_db, error.cosine) == (math.inf, 1)


def test_names_layers_and_roles_are_the_files() -> None:
    errors = errors_of("demo", "demo")
    weights = load_model_file("demo").weights
    assert [(e.name, e.layer, e.role) for e in errors] == [
        (w.name, w.layer, w.role) for w in weights
    ]


def test_the_result_does_not_depend_on_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # three pieces, the last one incomplete
    monkeypatch.setattr(measure, "PIECE", 2 * CHUNK)
    tensors = {"a.weight": random(5 * CHUNK // 4096 - 20, 4096), "b.weight": random(7)}
    plain = write_plain(tmp_path / "plain.gguf", tensors)
    stored = write_model(tmp_path / "q8.gguf", tensors)
    one, many = errors_of(plain, stored, threads=1), errors_of(plain, stored, threads=5)
    assert one == many
    x = tensors["a.weight"]
    y = gguf.quants.dequantize(gguf.quants.quantize(x, Q8_0), Q8_0)
    difference = np.abs(x.astype(np.float64) - y).ravel()
    assert one[0].rmse == pytest.approx(math.sqrt(np.mean(difference**2)), rel=1e-6)
    assert one[0].max_error == pytest.approx(difference.max())
    blocks = (difference.reshape(-1, 32) ** 2).sum(axis=1)
    assert one[0].worst_block == blocks.argmax()


@pytest.mark.native
def test_progress_is_in_bytes_and_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    candidate = load_model_file(quantized_demo("Q4_K_M"))
    reference = load_model_file("demo")
    compute_weight_errors(reference, candidate, on_progress=lambda *at: seen.append(at))
    total = reference.n_bytes + candidate.n_bytes
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


def test_what_is_no_number_is_counted(tmp_path: Path) -> None:
    good = write_llama(tmp_path / "good.gguf")
    bad = write_llama(tmp_path / "bad.gguf", nan_in="blk.1.ffn_up.weight")
    for pair in ((good, bad), (bad, good)):
        by_name = {error.name: error for error in errors_of(*pair)}
        error = by_name.pop("blk.1.ffn_up.weight")
        assert error.non_finite == error.n_elements
        assert math.isnan(error.rmse)
        assert all(error.non_finite == 0 and error.rmse == 0 for error in by_name.values())


def test_a_tensor_without_elements_is_no_error(tmp_path: Path) -> None:
    path = write_plain(tmp_path / "m.gguf", {"a.weight": random(0, 32), "b.weight": random(32)})
    empty, other = errors_of(path, path)
    assert empty.sums == Sums()
    assert other.rmse == 0


def test_a_tied_output_stands_for_one_of_its_own(tmp_path: Path) -> None:
    tokens = random(64, 32)
    tied = write_plain(tmp_path / "tied.gguf", {"token_embd.weight": tokens})
    own = write_model(
        tmp_path / "own.gguf", {"output.weight": tokens + 1, "token_embd.weight": tokens}
    )
    output, _ = errors_of(tied, own)
    assert (output.name, output.role) == ("output.weight", "output")
    assert output.rmse == pytest.approx(1, abs=0.01)
    assert output.n_bytes == 64 * 34
    tokens_back, output_back = errors_of(own, tied)
    assert (tokens_back.name, output_back.name) == ("token_embd.weight", "output.weight")
    assert output_back.n_bytes == 0, "it adds no bytes"
    assert output_back.rmse == pytest.approx(1, abs=0.01)
    assert [error.name for error in errors_of(tied, tied)] == ["token_embd.weight"]


def test_models_that_do_not_match_are_named(tmp_path: Path) -> None:
    a, b = random(4, 32), random(32)
    model = write_plain(tmp_path / "model.gguf", {"a.weight": a, "b.weight": b})
    cases = {
        "'b.weight'": write_plain(tmp_path / "less.gguf", {"a.weight": a}),
        "'c.weight', 'd.weight', 'e.weight' and 2 more": write_plain(
            tmp_path / "more.gguf", {f"{name}.weight": b for name in "abcdefg"} | {"a.weight": a}
        ),
        "'a.weight' has the shape": write_plain(
            tmp_path / "shape.gguf", {"a.weight": a.reshape(8, 16), "b.weight": b}
        ),
        "'falcon'": write_plain(tmp_path / "other.gguf", {"a.weight": a, "b.weight": b}, "falcon"),
    }
    for words, other in cases.items():
        for pair in ((model, other), (other, model)):
            with pytest.raises(UsageError) as caught:
                errors_of(*pair)
            assert words in str(caught.value)
            assert str(other) in str(caught.value)
            assert "\n" not in str(caught.value)


def test_types_that_nothing_reads_are_left_out_with_the_reason(tmp_path: Path) -> None:
    tensors = {"a.weight": ("Q8_K", np.zeros((2, 292), np.uint8)), "b.weight": ("F32", random(32))}
    path = write_blocks(tmp_path / "q8k.gguf", tensors)
    skipped, other = errors_of(path, path)
    assert "Q8_K" in skipped.skipped
    assert math.isnan(skipped.rmse)
    assert skipped.n_bytes == 584
    assert (other.skipped, other.rmse) == ("", 0)


WITHOUT_NATIVE = """
import json, sys
sys.modules["llama_cpp"] = None  # an import of it fails
sys.path.insert(0, sys.argv[1])
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name == "llama_cpp" else find(name, *rest)
)
del sys.modules["llama_cpp"]
from llamacpp_instr.lab.weights.measure import load_dequantizer
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.lab.weights.measure import compute_weight_errors
errors = compute_weight_errors(load_model_file(sys.argv[2]), load_model_file(sys.argv[3]))
assert "llama_cpp" not in sys.modules
print(json.dumps([load_dequantizer().name, [[e.name, e.sums.e2, e.skipped] for e in errors]]))
"""


@pytest.mark.native
def test_without_the_native_library_gguf_py_does_it() -> None:
    for file_type, lacking in (("Q4_K_M", ""), ("Q1_0", "Q1_0")):
        candidate = quantized_demo(file_type)
        done = run_python(WITHOUT_NATIVE, ROOT, "demo", candidate, check=True)
        name, found = json.loads(done.stdout)
        assert name == "gguf-py"
        for error, (tensor, e2, skipped) in zip(errors_of("demo", candidate), found, strict=True):
            assert error.name == tensor
            if lacking and error.type.name == lacking:
                assert lacking in skipped
                assert "gguf-py" in skipped
                assert not error.skipped, "ggml reads it"
            else:
                assert (e2, skipped) == (error.sums.e2, "")


PEAK = """
import resource, sys
sys.path.insert(0, sys.argv[1])
from llamacpp_instr.lab.weights.measure import load_dequantizer
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.lab.weights.measure import compute_weight_errors
def peak():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
load_dequantizer()
compute_weight_errors(load_model_file("demo"), load_model_file("demo"), 2)
before = peak()
compute_weight_errors(load_model_file(sys.argv[2]), load_model_file(sys.argv[3]), 2)
print(peak() - before)
"""


def write_zeros(path: Path, rows: int) -> Path:
    """A model with an F32 tensor of rows of 4096 zeros, a hole that takes no disk space."""
    tensors = {"a.weight": np.zeros((1, 4096), np.float32), "b.weight": random(32)}
    small = write_plain(path.with_name("small.gguf"), tensors)
    return write_with_more_rows(small, path, "a.weight", 4 * rows * 4096)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's /proc")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    rows = 5 * PIECE // 4096
    path = write_zeros(tmp_path / "zeros.gguf", rows)
    done = run_python(PEAK, ROOT, path, path, check=True)
    assert int(done.stdout) < 4 * rows * 4096 / 4


INTERRUPTED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.lab.weights.measure import compute_weight_errors
seen = []
def on_progress(done, total):
    seen.append((done, total))
    if len(seen) == 1:
        os.kill(os.getpid(), signal.SIGINT)
model = load_model_file(sys.argv[2])
try:
    compute_weight_errors(model, model, 2, on_progress)
except KeyboardInterrupt:
    done, total = seen[-1]
    print("stopped" if done < total / 10 else "too late")
"""


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    path = write_zeros(tmp_path / "zeros.gguf", 1000 * PIECE // 4096)
    done = run_python(INTERRUPTED, ROOT, path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "stopped\n", "")
