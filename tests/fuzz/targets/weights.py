"""The errors of weights (`instr quality --only weights`), of a file against a valid one."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from converters.analyses.weight_errors import weight_error_reports
from llamacpp_instr.errors import InstrError
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.weights.compare import compute_weight_errors
from tests.fuzz.guard import check_message, check_reports

KIND = "gguf"
SOUND = Path(__file__).parent.parent / "corpus" / "gguf" / "seed-types.gguf"


def attempt(path: Path) -> None:
    model = load_model_file(path)
    for a, b in ((model, model), (_sound(), model), (model, _sound())):
        try:
            errors = compute_weight_errors(a, b, threads=1)
            check_reports(weight_error_reports(errors, a.path.name, b.path.name))
        except InstrError as error:
            check_message(error)


@cache
def _sound() -> ModelFile:
    return load_model_file(SOUND)
