"""`instr diverge` names the one weight that was damaged, wherever it is."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.diverge.report import first_beyond
from llamacpp_instr.diverge.run import Divergences, DivergeOptions, compare_models
from llamacpp_instr.model.file import ModelFile, load_model_file, role_of
from tests.kit.native_kit import random_models

pytestmark = pytest.mark.native

MODELS = ("llama-dense", "llama-moe", "gemma3-dense", "qwen2moe-moe", "gpt2-dense", "mamba-dense")
PLACES = 5
"""damaged weights of each model"""


def compared(a: ModelFile, b: ModelFile, **options: int) -> Divergences:
    chosen = DivergeOptions(**{"tokens": 8, "ctx": 8, "threads": 1} | options)
    return compare_models(a, b, None, chosen, False, lambda *_: None, lambda *_: None)


def damaged(model: ModelFile, name: str, to: Path) -> ModelFile:
    """A copy in which the values of one weight are another half larger, and none is zero."""
    shutil.copyfile(model.path, to)
    weight = model.by_name[name]
    dtype = {"F32": np.float32, "F16": np.float16}[weight.type.name]
    values = np.memmap(to, dtype, "r+", weight.offset, (weight.n_elements,))
    values[:] = values * dtype(1.5) + dtype(0.01)
    values.flush()
    return load_model_file(to)


def places(model: ModelFile) -> list[str]:
    """Weights of different roles, of those that an op reads: a file may have scales for types that
    it does not use."""
    read = {name for error in compared(model, model).errors for name in error.weights}
    rng = random.Random(model.path.name)
    names = sorted(read)
    rng.shuffle(names)
    roles = {role_of(name): name for name in names}
    return rng.sample(sorted(roles.values()), PLACES)


@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_weight_is_named_first(name: str, tmp_path: Path) -> None:
    model = load_model_file(random_models() / f"{name}.gguf")
    chosen = places(model)
    for weight in chosen:
        found = compared(model, damaged(model, weight, tmp_path / "b.gguf"))
        first = first_beyond(found.errors, 0.01)
        assert first is not None, weight
        assert weight in first.weights


def test_a_model_does_not_differ_from_itself() -> None:
    model = load_model_file(random_models() / "llama-moe.gguf")
    found = compared(model, model)
    assert len(found.errors) > 50
    assert first_beyond(found.errors, 0) is None
    assert found.kl.max() == 0
