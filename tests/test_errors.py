"""An error of the operating system is reported in words, without its number."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.llama.build.source_tree import unpack_sdist
from llamacpp_instr.llama.build.wheel import _compiler_version
from llamacpp_instr.model.file import demo_model, load_model_file


def map_weights(path: Path) -> None:
    shutil.copyfile(demo_model(), path)
    model = load_model_file(path)
    reader = WeightReader(model)
    path.unlink()
    reader.raw(model.weights[0])


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (map_weights, "cannot be read: No such file or directory"),
        (lambda path: unpack_sdist(path.parent, path), "cannot be unpacked: Is a directory"),
        (lambda path: _compiler_version(str(path)), "does not work: No such file or directory"),
    ],
    ids=["weights", "an sdist", "a compiler"],
)
def test_an_error_of_the_system_has_words(
    act: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InstrError) as error:
        act(tmp_path / "absent")
    assert str(error.value).endswith(words)
