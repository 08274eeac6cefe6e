"""`instr recipe`: what it measures, chooses and writes, each against an independent figure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.base import system
from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.quality.divergence import CacheTypes
from llamacpp_instr.lab.quality.logits import OutputOptions, compare_outputs
from llamacpp_instr.lab.quantize.plan import QuantizeOptions, parse_tensor_type
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.lab.weights.measure import compute_weight_errors
from llamacpp_instr.llama.generate import tokenize
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.recipe import measure as measuring
from llamacpp_instr.recipe.measure import (
    Calibration,
    Measured,
    cut_calibration,
    measure,
    measure_caches,
    weighted_errors,
)
from llamacpp_instr.recipe.run import Limits, find_recipe, standard_plans, try_caches
from llamacpp_instr.recipe.verify import F16
from tests.conftest import Instr, assert_refused
from tests.kit import tiny_models
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.nursery import Nursery
from tests.kit.programs import run_python
from tests.kit.quantize_kit import write_imatrix
from tests.kit.quantized_kit import quantized_demo

pytestmark = pytest.mark.native
PAGES = ("README.md", "docs/explanation/demo-model.md")
TEXT = "".join((ROOT / page).read_text() for page in PAGES)
"""each half has more than two contexts of 512 tokens"""
SMALL = ("--chunks", 1, "--threads", 1)
MACHINE = ROOT / "tests" / "fixtures" / "machine.json"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "cache_dir", lambda: cache)


@pytest.fixture
def instr(tmp_path: Path, environment: dict[str, str], nursery: Nursery, cache: Path) -> Instr:
    """Runs a command that keeps what it measures in a directory of this test."""

    def run(*args: object, input: str | None = None) -> subprocess.CompletedProcess[str]:
        own = {**environment, "LLAMACPP_INSTR_CACHE": str(cache)}
        return nursery.run([str(word) for word in args], tmp_path, input, environment=own)

    return run


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def source() -> ModelFile:
    return load_model_file(DEMO)


CALIBRATION = Calibration(TEXT[: len(TEXT) // 2], 256, 1, 1)


@pytest.fixture
def measured(source: ModelFile) -> Measured:
    """Of the first half of the text; measured by the first test that needs it."""
    return measure(source, QuantizeOptions(threads=1), CALIBRATION)


def made(instr: Instr, *words: object) -> list[dict[str, Any]]:
    done = instr("recipe", "demo", *words, *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    reports: list[dict[str, Any]] = json.loads(done.stdout)
    return reports


@pytest.mark.parametrize("name", ["Q4_K_M", "IQ4_XS", "Q8_0"])
def test_errors_without_importances_are_those_of_instr_quality(
    source: ModelFile, name: str
) -> None:
    file = load_model_file(quantized_demo(name))
    found = weighted_errors(source, file, {})
    expected = {of.name: of.sums.e2 for of in compute_weight_errors(source, file)}
    assert found.keys() == {
        of.name for of in source.weights if of.type != file.by_name[of.name].type
    }
    for tensor, error in found.items():
        assert error == pytest.approx(expected[tensor], rel=1e-5), tensor


def test_the_error_of_a_column_counts_by_its_importance(source: ModelFile) -> None:
    import gguf

    file = load_model_file(quantized_demo("Q4_K_M"))
    name = "blk.0.ffn_down.weight"
    importance = np.linspace(0, 3, source.by_name[name].row_length, dtype=np.float32)
    a, b = (
        next(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            for tensor in gguf.GGUFReader(path).tensors
            if tensor.name == name
        )
        for path in (DEMO, quantized_demo("Q4_K_M"))
    )
    expected = float((np.square(a.astype(np.float64) - b) * importance).sum())
    found = weighted_errors(source, file, {name: importance})
    assert found[name] == pytest.approx(expected, rel=1e-5)


KL = """
import json, sys
import numpy as np
import llama_cpp

tokens, chances = json.loads(sys.argv[1]), []
for path in sys.argv[2:]:
    llm = llama_cpp.Llama(path, n_ctx=256, n_batch=256, n_threads=1, logits_all=True, verbose=False)
    llm.eval(tokens)
    logits = np.array(llm.scores[: len(tokens)], np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chances.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
print(float((np.exp(chances[0]) * (chances[0] - chances[1])).sum(axis=1).mean()))
"""


@pytest.mark.parametrize("key", ["attn_v 2", "ffn_down 0-1", "token_embd"])
def test_an_effect_is_that_of_a_file_in_which_only_these_tensors_are_quantized(
    source: ModelFile, measured: Measured, tmp_path: Path, key: str
) -> None:
    names = measured.groups[key]
    types = [(f"re:^{name}$", "Q4_K") for name in names] + [("*", "F16")]
    options = QuantizeOptions([(pattern, parse_tensor_type(of)) for pattern, of in types])
    with Quantizer(source, options) as quantizer:
        quantizer.write([quantizer.plan("Q4_K_S")], [tmp_path / "one.gguf"])
    changed = load_model_file(tmp_path / "one.gguf")
    assert [of.name for of in changed.weights if of.type.is_quantized] == list(names)
    [tokens] = tokenize(DEMO, [CALIBRATION.text or ""], parse_special=False)
    chunk = tokens[: CALIBRATION.ctx]
    if source.metadata.get("tokenizer.ggml.add_bos_token"):
        chunk[0] = int(source.metadata["tokenizer.ggml.bos_token_id"])
    done = run_python(KL, json.dumps(chunk), DEMO, tmp_path / "one.gguf", cwd=ROOT, check=True)
    assert measured.effects[key] == pytest.approx(float(done.stdout), rel=0.02)


def test_a_tensor_has_the_share_of_its_error_in_the_effect_of_its_group(
    source: ModelFile, measured: Measured
) -> None:
    for key, names in measured.groups.items():
        at_probe = [
            next(of.kl for of in measured.choices[name] if of.type.name == "Q4_K") for name in names
        ]
        assert sum(at_probe) == pytest.approx(measured.effects[key])
    for name, choices in measured.choices.items():
        assert choices[-1].type == source.by_name[name].type
        assert choices[-1].kl == 0
        assert [of.n_bytes for of in choices] == sorted(of.n_bytes for of in choices)


def test_what_was_measured_is_not_measured_again(
    source: ModelFile, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Calibration(TEXT[:2000], 64, 1, 1)

    class Interrupted(Exception):
        pass

    def stop(done: int, _total: int) -> None:
        if done == 3:
            raise Interrupted

    before = set(cache.rglob("*.json"))
    with pytest.raises(Interrupted):
        measure(source, QuantizeOptions(threads=1), other, on_effects=stop)
    [kept] = set(cache.rglob("*.json")) - before
    assert len(json.loads(kept.read_text())["effects"]) == 3
    progress: list[tuple[str, int]] = []
    found = measure(
        source, QuantizeOptions(threads=1), other,
        lambda _done, total: progress.append(("error", total)),
        lambda _done, total: progress.append(("effect", total)),
    )  # fmt: skip
    assert progress == [("effect", len(found.groups) + 1 - 3)] * (len(found.groups) + 1 - 3)
    monkeypatch.setattr(measuring, "_mixtures", None)  # is not called again
    assert measure(source, QuantizeOptions(threads=1), other).effects == found.effects


def test_it_diverges_less_than_llama_cpps_type_with_no_more_bytes(
    instr: Instr, tmp_path: Path, text: Path
) -> None:
    own = quantized_demo("Q4_K_M")
    size = own.stat().st_size
    reports = made(instr, "--size", size, "--text", text, "-o", "mix.gguf")
    mix = tmp_path / "mix.gguf"
    table, groups = reports
    rows = {row["model"]: row for row in table["rows"]}
    assert rows["mix"]["size"] == mix.stat().st_size <= size
    assert rows["Q4_K_M"]["size"] == size
    assert rows["mix"]["kl"] < rows["Q4_K_M"]["kl"]
    assert sum(row["bytes"] for row in groups["rows"]) == sum(
        of.n_bytes for of in load_model_file(mix).weights if of.type.is_quantized
    )
    # on the other half of the text, as instr quality measures it
    middle = TEXT.find(" ", len(TEXT) // 2)
    (tmp_path / "half.txt").write_text(TEXT[middle:])
    done = instr(
        "quality", "demo", mix, own, "--text", "half.txt", "--ctx", 512, *SMALL,
        "--only", "outputs", "--json",
    )  # fmt: skip
    quality = {row["model"]: row for row in json.loads(done.stdout)[0]["rows"]}
    for name, file in (("mix", "mix.gguf"), ("Q4_K_M", own.name)):
        assert rows[name]["kl"] == pytest.approx(quality[file]["mean_kl"])
        assert rows[name]["perplexity"] == pytest.approx(quality[file]["perplexity"])


def test_memory_and_speed_are_bounds(instr: Instr, tmp_path: Path, text: Path) -> None:
    context = ("--ctx", 256, "--cache-type-k", "q8_0", "--cache-type-v")
    bound = ("--memory", "6.7MB", *context, "f16,q8_0", "--text", text)
    reports = {of["id"]: of for of in made(instr, *bound, "-o", "small.gguf")}
    best, other = reports["caches"]["rows"]
    assert best["together"] == best["kl_alone"] + best["kl_of_the_weights"] <= other["together"]
    recipe = json.loads((tmp_path / "small.json").read_text())
    done = instr("memory", "small.gguf", *context, recipe["cache_type_v"], "--json")
    reports = {of["id"]: of for of in json.loads(done.stdout)}
    total = reports["memory"]["rows"][-1]
    assert total["memory"] == "total"
    assert 6_400_000 < total["predicted"] <= 6_700_000
    bounds = ("--speed", 3500, "--machine", MACHINE, "--size", "3MB", "--text", text)
    made(instr, *bounds, "-o", "fast.gguf")
    done = instr("predict", "fast.gguf", "--machine", MACHINE, "--threads", 1, "--json")
    [row] = json.loads(done.stdout)[0]["rows"]
    assert row["tokens"] >= 3500
    assert (tmp_path / "fast.gguf").stat().st_size <= 3_000_000


def test_an_importance_matrix_is_used(instr: Instr, source: ModelFile, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(TEXT[:3000])
    ramps = {
        of.name: np.arange(1, 1 + of.row_length, dtype=np.float32)
        for of in source.weights
        if len(of.ne) > 1
    }
    write_imatrix(tmp_path / "imatrix.gguf", ramps)
    bound = ("--bpw", 3.6, "--text", "short.txt", "--imatrix", "imatrix.gguf")
    made(instr, *bound, "-o", "mix.gguf")
    recipe = json.loads((tmp_path / "mix.json").read_text())
    assert recipe["imatrix"] == "imatrix.gguf"
    written = load_model_file(tmp_path / "mix.gguf").metadata
    assert written["quantize.imatrix.file"] == "imatrix.gguf"
    again = ("recipe", "demo", "--recipe", "mix.json", "-o", "again.gguf")
    assert_refused(instr(*again), "made with the importance matrix imatrix.gguf; give it with")
    assert instr(*again, "--imatrix", "imatrix.gguf").returncode == 0
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "mix.gguf").read_bytes()


def test_a_smaller_cache_makes_room_for_weights(source: ModelFile, measured: Measured) -> None:
    """What a cache costs on its own is what `instr quality` finds; the best mixture beside each is
    within the same memory."""
    small = CacheTypes("q4_0", "q8_0")
    options = QuantizeOptions(threads=1)
    kl = measure_caches(source, options, CALIBRATION, [F16, small])
    chunks = cut_calibration(source, CALIBRATION)
    how = OutputOptions(ctx=256, threads=1)
    [found] = compare_outputs([source] * 2, chunks, how, caches=[F16, small]).divergences
    assert kl == {F16: 0.0, small: pytest.approx(found.kl.value)}
    with Quantizer(source, options) as quantizer:
        plans = standard_plans(quantizer)
        limits = Limits(memory=9_400_000, ctx=512)
        best, other = try_caches(measured, plans, options, limits, kl)
        with pytest.raises(UsageError, match="no mixture is within"):
            try_caches(measured, plans, options, limits, {F16: 0.0})
    assert (best.types, other.types, other.recipe) == (small, F16, None)


def test_llama_cpps_types_are_compared(instr: Instr, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text(TEXT[:3000])
    [table] = made(instr, "--text", "short.txt", "--machine", MACHINE)
    rows = {row["type"]: row for row in table["rows"]}
    assert rows["Q4_K_M"]["size"] == quantized_demo("Q4_K_M").stat().st_size
    for row in rows.values():
        better = [
            other
            for other in rows.values()
            if other is not row
            and other["size"] <= row["size"]
            and other["kl"] <= row["kl"]
            and other["prefill"] >= row["prefill"]
            and other["decode"] >= row["decode"]
        ]
        assert (row["beaten_by"] is None) == (not better), row["type"]
    done = instr(
        "predict", "demo", "--types", "Q6_K", "--machine", MACHINE, "--threads", 1, "--json"
    )
    [predicted] = json.loads(done.stdout)[0]["rows"]
    assert rows["Q6_K"]["decode"] == pytest.approx(predicted["tokens"])
    assert rows["Q6_K"]["memory"] == predicted["memory"]
    assert any(note.startswith("Take ") for note in table["notes"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--size", "1MB", "-o", "a.gguf"],
            "no mixture is within the limits: the smallest file has",
        ),
        (["--memory", "1MB", "-o", "a.gguf"], "the context takes"),
        (["--speed", "1e9", "--machine", MACHINE, "-o", "a.gguf"], "the fastest mixture reads"),
        (["--bpw", "4"], "name the model to write with -o FILE.gguf"),
        (["--bpw", "4", "-o", "a.txt"], "name the model to write with -o FILE.gguf"),
        (["--ctx", "512"], "--ctx is for the context of --memory"),
        (["--cache-type-k", "q8_0"], "--cache-type-k is for the context of --memory"),
        (["--memory", "9MB", "--cache-type-v", "q9", "-o", "a.gguf"], "q9"),
        (["--bpw", "4", "--recipe", "x.json", "-o", "a.gguf"], "--bpw has no effect with --recipe"),
        (["--recipe", "x.json", "-o", "a.gguf"], "x.json cannot be read"),
        (["--size", "4.5", "-o", "a.gguf"], "is not between 1MB and"),
    ],
)
def test_wrong_input_is_one_line(
    instr: Instr, tmp_path: Path, text: Path, words: list[object], message: str
) -> None:
    own = () if "--recipe" in words or len(words) < 3 else ("--text", text)
    assert_refused(instr("recipe", "demo", *words, *own, *SMALL), message)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_solver_is_named_before_anything_is_measured(
    source: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "is_installed", lambda module: module != "ortools")
    with pytest.raises(UsageError, match=r"ortools"):
        find_recipe(
            source, QuantizeOptions(), (CALIBRATION, CALIBRATION), Limits(bpw=4.5),
            tmp_path / "a.gguf", False,
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_a_short_text_and_another_models_recipe_are_refused(instr: Instr, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Once upon a time")
    assert_refused(instr("recipe", "demo", "--text", "short.txt"), "half of the text has")
    tiny_models.write_llama(tmp_path / "other.gguf")
    (tmp_path / "recipe.json").write_text(
        '{"recipe": 1, "source": "demo.gguf", "source_bytes": 1, "file_type": "Q4_K_M",'
        ' "tensors": {"strange.weight": "Q4_K"}}'
    )
    again = instr("recipe", "other.gguf", "--recipe", "recipe.json", "-o", "again.gguf")
    assert_refused(again, "other.gguf is not the model of the recipe, demo.gguf")
