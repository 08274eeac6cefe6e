"""Models that cannot be quantized give one line, the interpreter survives, and no partial file
remains."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.lab.quantize.plan import QuantizeOptions
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.lab.weights.measure import compute_weight_errors
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import BY_NAME
from tests.conftest import Instr, assert_refused
from tests.kit.quantize_kit import (
    importances,
    plan_quantization,
    quantize_model,
    write_imatrix,
    write_model,
)
from tests.kit.sparse_models import write_with_more_rows
from tests.kit.tiny_models import write_llama

pytestmark = pytest.mark.native


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("wide") / "wide.gguf")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--types", "Q4_X"], ["'Q4_X'", "Q4_K_M"]),
        (["--types", "Q8_0,"], ["''"]),
        (["--types", "NVFP4"], ["NVFP4", "only reads"]),
        (["--types", "Q8_0", "-o", "-"], ["-o"]),
        (["--types", "Q8_0", "-o", "nowhere"], ["no directory nowhere"]),
        (["--types", "Q8_0,Q4_0", "-o", "one.gguf"], ["one.gguf", "2 types"]),
        (["--types", "IQ2_XS"], ["importance matrix", "blk.0.", "llama-imatrix"]),
        (["--types", "Q2_K_S"], ["importance matrix", "Q2_K"]),
        (["--types", "Q4_K", "--embedding-type", "IQ1_S"], ["importance", "token_embd.weight"]),
        (["--types", "Q4_K", "--tensor-type", "attn_q"], ["attn_q", "PATTERN=TYPE"]),
        (["--types", "Q4_K", "--tensor-type", "attn_q=Q9"], ["'Q9'"]),
        (["--types", "Q4_K", "--tensor-type", "attn_q=Q8_K"], ["'Q8_K'", "cannot"]),
        (["--types", "Q4_K", "--tensor-type", "attn_x=Q8_0"], ["'attn_x'", "no tensor"]),
        (["--types", "Q4_K", "--tensor-type", "attn_(=Q8_0"], ["'attn_('", "not a valid pattern"]),
        (["--types", "F16", "--tensor-type", "attn_q=Q8_0"], ["F16"]),
        (["--types", "Q4_K", "--imatrix", "nothing.gguf"], ["nothing.gguf"]),
    ],
)
def test_a_wrong_argument_is_one_line(
    instr: Instr, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    assert_refused(instr("quantize", "demo", *arguments), *words)
    assert list(tmp_path.iterdir()) == []


def test_one_of_several_types_that_cannot_be_made_stops_all(instr: Instr, tmp_path: Path) -> None:
    assert_refused(instr("quantize", "demo", "--types", "Q8_0,IQ1_M"), "IQ1_M")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_stays_unless_forced(instr: Instr, wide: Path, tmp_path: Path) -> None:
    there = tmp_path / "wide-Q8_0.gguf"
    there.write_text("mine")
    assert_refused(instr("quantize", wide, "--types", "Q4_0,Q8_0"), str(there.name), "--force")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(there.name, "mine")]
    assert instr("quantize", wide, "--types", "Q8_0", "--force").returncode == 0
    load_model_file(there)


def test_the_source_is_never_the_output(instr: Instr, wide: Path, tmp_path: Path) -> None:
    source, before = tmp_path / "model.gguf", wide.read_bytes()
    source.write_bytes(before)
    (tmp_path / "link.gguf").symlink_to(source)
    for name in ("model.gguf", "link.gguf"):
        done = instr("quantize", source, "--types", "Q8_0", "-o", name, "--force")
        assert_refused(done, f"{name} would overwrite the input {source}")
    assert source.read_bytes() == before


def test_a_model_that_is_quantized_already(wide: Path, tmp_path: Path) -> None:
    eight = quantize_model(load_model_file(wide), "Q8_0", tmp_path / "eight.gguf").path
    with pytest.raises(UsageError, match=r"already quantized.*Q8_0.*quantize --allow-requantize"):
        quantize_model(load_model_file(eight), "Q4_0", tmp_path / "four.gguf")
    # copied tensors lose nothing
    again = quantize_model(load_model_file(eight), "Q8_0", tmp_path / "again.gguf").path
    assert again.read_bytes() == eight.read_bytes()


def test_embeddings_whose_rows_the_wanted_type_does_not_divide(tmp_path: Path) -> None:
    narrow = load_model_file(write_model(tmp_path / "narrow.gguf", 96))
    for option in ("embedding_type", "output_type"):
        options = QuantizeOptions(**{option: BY_NAME["Q4_K"]})
        with pytest.raises(UsageError, match=r"rows of 96 elements.*blocks of 256"):
            plan_quantization(narrow, "Q8_0", options)


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    model = load_model_file(write_llama(tmp_path / "nan.gguf", nan_in="blk.1.ffn_up.weight"))
    for file_type in ("Q8_0", "F16"):
        with pytest.raises(UsageError, match=r"blk\.1\.ffn_up\.weight.*invalid data"):
            quantize_model(model, file_type, tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["nan.gguf"]


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("y" * 70 + ".weight", "longer than 63 bytes"),
        ("a\nb.weight", r"does not list 'a\\nb\.weight'"),
    ],
)
def test_names_that_llama_cpp_cannot_take_or_tell(tmp_path: Path, name: str, finding: str) -> None:
    model = write_model(tmp_path / "model.gguf", shapes={name: (8, 256)})
    with pytest.raises(InstrError, match=finding):
        plan_quantization(load_model_file(model), "Q8_0")


def test_a_tensor_without_dimensions_where_there_should_be_rows(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", shapes={"token_embd.weight": ()})
    options = QuantizeOptions(embedding_type=BY_NAME["Q8_0"])
    with pytest.raises(UsageError, match="rows of 1 elements"):
        plan_quantization(load_model_file(model), "Q8_0", options)
    plan_quantization(load_model_file(model), "Q4_K_M")


def test_a_hyper_parameter_that_is_missing(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf")
    model.write_bytes(model.read_bytes().replace(b"llama.block_count", b"llama.block_coumt"))
    with pytest.raises(UsageError, match=r"key not found in model: llama\.block_count"):
        plan_quantization(load_model_file(model), "Q8_0")


def test_a_vocabulary_has_nothing_to_quantize(instr: Instr, models: Path) -> None:
    done = instr("quantize", models / "vocabulary.gguf", "--types", "Q8_0")
    assert_refused(done, "no weights")


def test_an_importance_matrix_of_another_model(wide: Path, tmp_path: Path) -> None:
    sums = importances(wide)
    sums["blk.0.ffn_up.weight"] = np.ones(32, np.float32)
    options = QuantizeOptions(imatrix=write_imatrix(tmp_path / "other.gguf", sums))
    with pytest.raises(UsageError, match=r"another model.*32 importances.*blk\.0\.ffn_up"):
        plan_quantization(load_model_file(wide), "Q4_K_M", options)
    matrix = write_imatrix(tmp_path / "none.gguf", {"x.weight": np.ones(256, np.float32)})
    with pytest.raises(UsageError, match=r"another model.*none of the tensors"):
        plan_quantization(load_model_file(wide), "Q4_K_M", QuantizeOptions(imatrix=matrix))
    # as of a model with more layers, of the same width
    more = importances(wide) | {"blk.8.ffn_up.weight": np.ones(256, np.float32)}
    matrix = write_imatrix(tmp_path / "more.gguf", more)
    with pytest.raises(UsageError, match=r"another model.*'blk\.8\.ffn_up\.weight', which .*wide"):
        plan_quantization(load_model_file(wide), "Q4_K_M", QuantizeOptions(imatrix=matrix))


def test_an_importance_matrix_that_lacks_a_tensor_which_needs_it(
    wide: Path, tmp_path: Path
) -> None:
    source, name = load_model_file(wide), "blk.5.attn_q.weight"
    matrix = write_imatrix(tmp_path / "matrix.gguf", importances(wide, [name]))
    with pytest.raises(UsageError, match=r"no importances for 'blk\.5\.attn_q\.weight'.*IQ2_XXS"):
        plan_quantization(source, "IQ2_XXS", QuantizeOptions(imatrix=matrix))
    plan_quantization(source, "Q4_K_M", QuantizeOptions(imatrix=matrix))

    # llama-imatrix's matrices never contain the embeddings; ggml would abort on these types
    matrix = write_imatrix(tmp_path / "rest.gguf", importances(wide, ["token_embd.weight"]))
    options = QuantizeOptions(imatrix=matrix, embedding_type=BY_NAME["IQ2_XS"])
    with pytest.raises(UsageError, match=r"no importances for 'token_embd\.weight'"):
        plan_quantization(source, "Q4_K_M", options)


def test_importances_of_zero_that_would_lose_weights(wide: Path, tmp_path: Path) -> None:
    """The columns of one scale with zeros only have no error whatever their scale is, so ggml
    stores zeros."""
    sums, name = importances(wide), "blk.5.attn_q.weight"
    sums[name][64:79] = 0  # a column is left
    options = QuantizeOptions(imatrix=write_imatrix(tmp_path / "some.gguf", sums), pure=True)
    source = load_model_file(wide)
    output = tmp_path / "some-Q6_K.gguf"
    quantize_model(source, "Q6_K", output, options)
    errors = {of.name: of.sqnr_db for of in compute_weight_errors(source, load_model_file(output))}
    assert errors[name] > 30

    sums[name][79] = 0
    options = QuantizeOptions(imatrix=write_imatrix(tmp_path / "zero.gguf", sums), pure=True)
    with pytest.raises(UsageError, match=r"16 or more columns.*'blk\.5\.attn_q\.weight'"):
        plan_quantization(source, "Q6_K", options)
    plan_quantization(source, "Q8_0", options)  # without importances


@pytest.mark.parametrize("value", [1e-30, 1e30])
def test_importances_with_which_ggml_cannot_compute(
    wide: Path, tmp_path: Path, value: float
) -> None:
    """It squares them in float32: in IQ2_S, weights of such columns become zeros."""
    sums, name = importances(wide), "blk.5.attn_q.weight"
    sums[name][64:96] = value
    options = QuantizeOptions(imatrix=write_imatrix(tmp_path / "far.gguf", sums), pure=True)
    with pytest.raises(UsageError, match=r"16 or more columns.*'blk\.5\.attn_q\.weight'"):
        plan_quantization(load_model_file(wide), "IQ2_M", options)


def test_what_a_matrix_says_too_little_of(instr: Instr, wide: Path, tmp_path: Path) -> None:
    """The embeddings are never in llama-imatrix's matrices, so they are not missed."""
    lacking = ["blk.2.ffn_up.weight", "token_embd.weight", "output.weight"]
    write_imatrix(tmp_path / "i.gguf", importances(wide, lacking))
    command = ("quantize", wide, "--imatrix", "i.gguf", "--dry-run", "--types")
    done = instr(*command, "Q4_K_M")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "i.gguf: it was computed from only 1,024 tokens; give it 8,192 or more",
        "i.gguf: it has no importances for blk.2.ffn_up.weight",
    ]
    done = instr(*command, "Q8_0")
    assert "blk.2" not in done.stderr, "Q8_0 uses no importances"


def test_an_expert_without_tokens_is_pointed_out_and_keeps_its_weights(
    instr: Instr, tmp_path: Path
) -> None:
    name = "blk.0.ffn_up_exps.weight"
    model = write_model(tmp_path / "experts.gguf", shapes={name: (4, 8, 256)})
    sums = importances(model)
    sums[name][3] = 0
    write_imatrix(tmp_path / "i.gguf", sums, count=3)
    command = ("quantize", model, "--types", "Q4_K", "--imatrix", "i.gguf", "-o", "out.gguf")
    done = instr(*command)
    assert (
        f"i.gguf: 1 expert of {name} saw no token, so all columns there count the same; a longer or"
        " more varied text reaches more" in done.stderr
    )
    files = load_model_file(model), load_model_file(tmp_path / "out.gguf")
    errors = {of.name: of.sqnr_db for of in compute_weight_errors(*files)}
    assert errors[name] > 20


def test_strict_writes_nothing_if_a_tensor_falls_back(instr: Instr, tmp_path: Path) -> None:
    model = write_model(tmp_path / "narrow.gguf", width=96)
    command = ("quantize", model, "--strict", "-o", "made", "--types")
    (tmp_path / "made").mkdir()
    done = instr(*command, "Q8_0,Q4_K_M")
    assert done.returncode == 1
    assert "Tensors that fall back to another type" in done.stdout
    assert done.stdout.startswith("What narrow.gguf would become")
    assert re.fullmatch(
        r"--strict: \d+ tensors would fall back; nothing was quantized\n", done.stderr
    )
    assert list((tmp_path / "made").iterdir()) == []
    assert instr(*command, "Q4_K_M", "--dry-run").returncode == 1
    done = instr(*command, "Q8_0")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["narrow-Q8_0.gguf"]


def test_a_tensor_without_elements(instr: Instr, tmp_path: Path) -> None:
    """On which the quantizer divides by zero."""
    path = write_model(tmp_path / "model.gguf", shapes={"blk.0.empty.weight": (0, 256)})
    done = instr("quantize", path, "--types", "Q4_K", "--dry-run")
    assert_refused(done, "'blk.0.empty.weight' has no elements")


def test_an_abort_of_ggml_is_an_error_of_ours(tmp_path: Path) -> None:
    """The quantizer ignores the fourth dimension and aborts, which no check of ours predicts."""
    four = {"extra.weight": (2, 2, 2, 256)}
    model = load_model_file(write_model(tmp_path / "model.gguf", shapes=four))
    with pytest.raises(InstrError, match=r"died \(SIGABRT\).*GGML_ASSERT"):
        quantize_model(model, "Q8_0", tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_what_was_written_is_looked_at_before_it_gets_its_name(wide: Path, tmp_path: Path) -> None:
    with Quantizer(load_model_file(wide)) as quantizer:
        plan = dataclasses.replace(quantizer.plan("Q8_0"), file_type="Q4_0")
        with pytest.raises(InstrError, match=r"'output.weight' as Q6_K, although .* said Q8_0"):
            quantizer.write([plan], [tmp_path / "out.gguf"])
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_no_file(instr: Instr, wide: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    done = instr("quantize", wide, "--types", "Q8_0", "-o", "pipe.gguf", "--force")
    assert_refused(done, "pipe.gguf", "not a regular file")
    assert_refused(instr("quantize", wide, "--types", "Q8_0", "-o", os.devnull), os.devnull)


def test_a_disk_that_is_full(wide: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(InstrError, match="could not be written: is the disk full"):
            quantize_model(load_model_file(wide), "Q8_0", tmp_path / "out.gguf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_disk_holds_is_refused_before(tmp_path: Path) -> None:
    # other programs also write to the disk, so the size is far too large, and only checked
    size = 2 * shutil.disk_usage(tmp_path).free
    small = write_model(tmp_path / "small.gguf")
    source = load_model_file(
        write_with_more_rows(small, tmp_path / "large.gguf", "token_embd.weight", size)
    )
    plan = plan_quantization(source, "F32")
    with pytest.raises(UsageError, match=r"bytes are needed in .*, which has .* left"):
        Quantizer(source).check_outputs([plan], [tmp_path / "out.gguf"], force=False)


def test_a_quantizer_that_is_killed_is_an_error(wide: Path) -> None:
    with Quantizer(load_model_file(wide)) as quantizer:
        quantizer.plan("Q8_0")
        quantizer.process.kill()
        quantizer.process.wait()
        with pytest.raises(InstrError, match=r"died \(SIGKILL\)"):
            quantizer.plan("Q4_0")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_stopped_quantization_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, number: int, status: int
) -> None:
    process = subprocess.Popen(
        # computing its tables takes seconds
        [sys.executable, "-m", "llamacpp_instr", "quantize", "demo", "--types", "IQ3_S"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: any(path.stat().st_size > 10_000 for path in tmp_path.iterdir()))
    process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    if number == signal.SIGINT:
        assert errors.strip() == "Interrupted"
    # after SIGKILL only the child process can remove it
    wait_for(lambda: list(tmp_path.iterdir()) == [])


def wait_for(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_without_the_library_it_says_what_to_do(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('no such library')\n")
    path = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "quantize", "demo", "--types", "Q8_0"],
        env={**environment, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert_refused(done, "no such library", "instr build")
