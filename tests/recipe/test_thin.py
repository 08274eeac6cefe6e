"""A model with some of the rows of its large matrices, read with gguf-py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from llamacpp_instr.lab.quantize.plan import QuantizeOptions
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.prediction.recorded import Shape, write_random_layers
from llamacpp_instr.recipe.measure import weighted_errors
from llamacpp_instr.recipe.thin import write_thinned
from tests.kit.native_kit import DEMO

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """Each of its experts has four times as many elements as needed."""
    shape = Shape(512, 2048, 8, 4, vocabulary=512, experts=2, used=1)
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return load_model_file(write_random_layers(path, shape, ["F16"]))


def data_of(path: Path) -> dict[str, np.ndarray]:
    return {of.name: np.array(of.data) for of in GGUFReader(path).tensors}


def test_matrices_that_are_not_large_are_whole(tmp_path: Path) -> None:
    thin, whole = write_thinned(load_model_file(DEMO), tmp_path / "thin"), data_of(DEMO)
    for name, data in data_of(thin.path).items():
        assert np.array_equal(data, whole.pop(name)), name
    assert not whole


def test_rows_of_large_ones_are_those_of_the_source_in_their_order(
    source: ModelFile, tmp_path: Path
) -> None:
    """Of each expert the same rows."""
    thin, whole = write_thinned(source, tmp_path / "thin"), data_of(source.path)
    assert thin.metadata == source.metadata
    found = data_of(thin.path)
    name = "blk.0.ffn_up_exps.weight"
    assert whole[name].shape[:2] == (2, 2048)
    assert found[name].shape[:2] == (2, 512)
    rows = np.sort(np.random.default_rng(0).choice(2048, 512, replace=False))
    assert np.array_equal(found[name], whole[name][:, rows])
    assert np.array_equal(found["blk.0.attn_q.weight"], whole["blk.0.attn_q.weight"])


def test_the_errors_of_some_rows_are_near_those_of_all(source: ModelFile, tmp_path: Path) -> None:
    """In the same types, although the file is smaller."""
    files = source, write_thinned(source, tmp_path / "thin")
    errors, types = [], []
    for i, file in enumerate(files):
        made = tmp_path / f"{i}.gguf"
        with Quantizer(file, QuantizeOptions(pure=True, threads=1)) as quantizer:
            quantizer.write([quantizer.plan("Q4_K_S")], [made])
        candidate = load_model_file(made)
        types.append({of.name: of.type for of in candidate.weights})
        found = weighted_errors(file, candidate, {})
        errors.append({name: e / file.by_name[name].n_rows for name, e in found.items()})
    assert types[0] == types[1]
    whole, thin = errors
    assert thin == pytest.approx(whole, rel=0.1)
    assert any(thin[name] != whole[name] for name in whole)
