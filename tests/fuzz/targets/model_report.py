"""`instr memory` and `instr compare` of model files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from converters.analyses.compare import compute_comparison
from converters.analyses.compare.candidate import Candidate
from converters.analyses.memory import compression_reports
from converters.analyses.memory.report_of_context import Held
from converters.analyses.stored_weights import stored_in_file
from llamacpp_instr.model.file import ModelFile, load_model_file
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
