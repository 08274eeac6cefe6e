"""llama-quantize makes the model of a recipe again from the files beside it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.model.file import load_model_file
from tests.conftest import Instr
from tests.kit.native_kit import DEMO, unpatched_library
from tests.parts.recipes.test_recipe import _own_cache, instr, made, text

__all__ = ["_own_cache", "instr", "text"]  # fixtures

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_the_files_beside_it_make_the_same_model_again(
    instr: Instr, tmp_path: Path, text: Path
) -> None:
    made(instr, "--bpw", 4.2, "--text", text, "-o", "mix.gguf")
    mix = (tmp_path / "mix.gguf").read_bytes()
    weights = load_model_file(tmp_path / "mix.gguf")
    assert 8 * weights.n_bytes / weights.n_elements <= 4.2
    done = instr("recipe", "demo", "--recipe", "mix.json", "-o", "again.gguf")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "again.gguf").read_bytes() == mix
    # llama-quantize itself
    file_type = json.loads((tmp_path / "mix.json").read_text())["file_type"]
    subprocess.run(
        [unpatched_library() / "llama-quantize", "--tensor-type-file", "mix.types.txt", DEMO,
         "upstream.gguf", file_type, "1"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    assert (tmp_path / "upstream.gguf").read_bytes() == mix
