"""`instr inspect`, with the tensors that fell back to another type."""

from __future__ import annotations

from pathlib import Path

from converters.analyses.inspect import compute_inspection, compute_tensors
from llamacpp_instr.model.file import load_model_file
from tests.fuzz.guard import check_reports

KIND = "gguf"


def attempt(path: Path) -> None:
    model = load_model_file(path)
    check_reports([*compute_inspection(model), compute_tensors(model)])
