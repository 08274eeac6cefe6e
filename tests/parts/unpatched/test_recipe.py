"""llama-quantize makes the model of a recipe again from the files beside it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.recipe import measure as measuring
from tests.conftest import Instr
from tests.kit.native_kit import DEMO, unpatched_library
from tests.kit.nursery import Nursery
from tests.parts.recipes.test_recipe import TEXT, made

pytestmark = pytest.mark.native


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
