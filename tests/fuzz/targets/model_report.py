"""`instr report` and `instr compare` of model files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from converters.compare import compute_comparison
from converters.compare.candidate import Candidate
from converters.compression import compression_reports
from converters.compression.held import Held
from converters.stored import stored_in_file
from llamacpp_instr.model_file import ModelFile, load_model_file
from tests.fuzz.guard import check_reports

KIND = "gguf"
SOUND = Path(__file__).parent.parent / "corpus" / "gguf" / "seed-types.gguf"


def attempt(path: Path) -> None:
    model = load_model_file(path)
    stored = stored_in_file(model)
    check_reports(compression_reports(stored, [Held(notes=["Nothing was predicted."])]))
    candidates = [
        Candidate("a", stored, model),
        Candidate("b", stored_in_file(_sound()), _sound()),
    ]
    for sides in (candidates, candidates[::-1]):
        check_reports(compute_comparison(sides, None, every_tensor=True))


@cache
def _sound() -> ModelFile:
    return load_model_file(SOUND)
