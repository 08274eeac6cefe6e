"""`instr blocks`: the tensors that can be decoded, each with itself as reference."""

from __future__ import annotations

from pathlib import Path

from converters.analyses.blocks import (
    block_reports,
    elements_report,
    histogram_report,
    tensor_reports,
)
from llamacpp_instr.errors import InstrError
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.weights.blocks import check_openable, find_reference, find_weight, load_block
from llamacpp_instr.weights.statistics import compute_block_stats
from tests.fuzz.guard import check_message, check_reports

KIND = "gguf"
MOST = 4
"""tensors to decode per file"""


def attempt(path: Path) -> None:
    model = load_model_file(path)
    for name in list(model.by_name)[:MOST]:
        try:
            weight = find_weight(model, name)
            check_openable(model, weight)
            reference = find_reference(model, weight)
            stats = compute_block_stats(weight, reference)
            check_reports([*tensor_reports(stats, str(path)), histogram_report(stats)])
            block = load_block(weight, 1, reference)
            check_reports([*block_reports(block, str(path)), elements_report(block)])
        except InstrError as error:
            check_message(error)
