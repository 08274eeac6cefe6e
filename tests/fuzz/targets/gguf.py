"""The surfaces that read a model file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from llamacpp_instr.converters.analyses import blocks as analysis
from llamacpp_instr.converters.analyses.compare import Candidate, compute_comparison
from llamacpp_instr.converters.analyses.inspect import compute_inspection, compute_tensors
from llamacpp_instr.converters.analyses.memory import (
    ContextMemory,
    compression_reports,
    stored_in_file,
)
from llamacpp_instr.converters.analyses.weights import weight_error_reports
from llamacpp_instr.lab.weights.blocks import (
    check_openable,
    find_reference,
    find_weight,
    load_block,
)
from llamacpp_instr.lab.weights.measure import compute_weight_errors
from llamacpp_instr.lab.weights.statistics import compute_block_stats
from llamacpp_instr.model.file import ModelFile, load_any_file, load_model_file
from llamacpp_instr.model.header import read_array, read_header, read_items
from tests.fuzz.guard import check_reports, may_refuse

SOUND = Path(__file__).parent.parent / "corpus" / "gguf" / "seed-types.gguf"
MOST = 4
"""tensors to decode per file"""


def gguf_header(path: Path) -> None:
    """The GGUF reader: header, arrays, items, and the model made of them."""
    with may_refuse():
        header = read_header(path)
        for array in header.arrays.values():
            read_array(path, array, 100)
            read_items(path, array, (0, 3, 2**40, array.count - 1))
    model = load_model_file(path)
    for weight in model.weights:
        assert weight.offset + weight.n_bytes <= path.stat().st_size
        assert weight.n_rows >= 0
        assert weight.layer >= -1
        assert isinstance(weight.role, str)


def inspection(path: Path) -> None:
    """`instr inspect`, with the tensors that fell back to another type."""
    model = load_any_file(path)
    check_reports([*compute_inspection(model), compute_tensors(model)])


def blocks(path: Path) -> None:
    """`instr blocks`: the tensors that can be decoded, each with itself as reference."""
    model = load_model_file(path)
    for name in list(model.by_name)[:MOST]:
        with may_refuse():
            weight = find_weight(model, name)
            check_openable(model, weight)
            reference = find_reference(model, weight)
            stats = compute_block_stats(weight, reference)
            tensor = analysis.tensor_reports(stats, str(path))
            check_reports([*tensor, analysis.histogram_report(stats)])
            block = load_block(weight, 1, reference)
            one = analysis.block_reports(block, str(path))
            check_reports([*one, analysis.elements_report(block)])


def model_report(path: Path) -> None:
    """`instr memory` and `instr compare` of model files."""
    model = load_model_file(path)
    stored = stored_in_file(model)
    check_reports(compression_reports(stored, [ContextMemory(notes=["Nothing was predicted."])]))
    candidates = [
        Candidate("a", stored, model),
        Candidate("b", stored_in_file(_sound()), _sound()),
    ]
    for sides in (candidates, candidates[::-1]):
        check_reports(compute_comparison(sides, None, every_tensor=True))


def weights(path: Path) -> None:
    """The errors of weights (`instr quality --only weights`), of a file against a valid one."""
    model = load_model_file(path)
    for a, b in ((model, model), (_sound(), model), (model, _sound())):
        with may_refuse():
            errors = compute_weight_errors(a, b, threads=1)
            check_reports(weight_error_reports(errors, a.path.name, b.path.name))


@cache
def _sound() -> ModelFile:
    return load_model_file(SOUND)
