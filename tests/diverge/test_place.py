"""`instr diverge` names the one weight that was damaged, wherever it is."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.diverge.report import divergence_reports, first_beyond
from llamacpp_instr.diverge.run import Divergences, DivergeOptions, compare_models
from llamacpp_instr.model.file import ModelFile, load_model_file, role_of
from tests.kit.native_kit import random_model
from tests.kit.reports import rows

pytestmark = pytest.mark.native

MODELS = ("llama-dense", "llama-moe", "gemma3-dense", "qwen2moe-moe", "gpt2-dense", "mamba-dense")
PLACES = 5
"""damaged weights per model"""


def compared(a: ModelFile, b: ModelFile, **options: int) -> Divergences:
    chosen = DivergeOptions(**{"tokens": 8, "ctx": 8, "threads": 1} | options)
    return compare_models(a, b, None, chosen, False, lambda *_: None, lambda *_: None)


def damaged(model: ModelFile, to: Path, *names: str) -> ModelFile:
    """A copy in which the values of these weights are half as large again, and none is zero."""
    shutil.copyfile(model.path, to)
    for weight in (model.by_name[name] for name in names):
        dtype = {"F32": np.float32, "F16": np.float16}[weight.type.name]
        values = np.memmap(to, dtype, "r+", weight.offset, (weight.n_elements,))
        values[:] = values * dtype(1.5) + dtype(0.01)
        values.flush()
    return load_model_file(to)


def places(model: ModelFile) -> list[str]:
    """Weights of different roles among those that an op reads: a file may have scales for types
    that it does not use."""
    read = {name for error in compared(model, model).errors for name in error.weights}
    rng = random.Random(model.path.name)
    names = sorted(read)
    rng.shuffle(names)
    roles = {role_of(name): name for name in names}
    return rng.sample(sorted(roles.values()), PLACES)


@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_weight_is_named_first(name: str, tmp_path: Path) -> None:
    model = load_model_file(random_model(name))
    chosen = places(model)
    for weight in chosen:
        found = compared(model, damaged(model, tmp_path / "b.gguf", weight))
        first = first_beyond(found.errors, 0.01)
        assert first is not None, weight
        assert weight in first.weights


@pytest.mark.parametrize("name", MODELS)
def test_the_list_of_causes_names_the_damaged_weights_only(name: str, tmp_path: Path) -> None:
    """Ops that read nothing that differs are not named, however much they amplify."""
    model = load_model_file(random_model(name))
    chosen = set(places(model))
    b = damaged(model, tmp_path / "b.gguf", *chosen)
    reports = divergence_reports(compared(model, b), model.path, b.path, 0.01, every_row=True)
    (causes,) = (rows(of) for of in reports if of.title == "Ops that add the most error")
    assert {name for row in causes for name in row["reads"].split(", ")} == chosen
    added = [row["added"] for row in causes]
    assert added == sorted(added, reverse=True)


def test_a_model_does_not_differ_from_itself() -> None:
    model = load_model_file(random_model("llama-moe"))
    found = compared(model, model)
    assert len(found.errors) > 50
    assert first_beyond(found.errors, 0) is None
    assert found.kl.max() == 0
