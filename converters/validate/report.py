"""The tables of a validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.validate.follow import Checked
from llamacpp_instr.converters.validate.run import OF_LOGITS, Validation
from llamacpp_instr.converters.validate.tolerances import rounds
from llamacpp_instr.converters.validate.whole import Whole
from llamacpp_instr.report.report import Cell, Column, Report

ROUNDED = 10
"""times the tolerance of logits that rounded activations may cost: the demo model in Q4_K_M reaches
twice the tolerance, and what is wired wrongly hundreds of times"""


@dataclass(frozen=True)
class Verdict:
    """The reports, and whether all errors are within their tolerance."""

    reports: list[Report]
    passed: bool


def judge(found: Validation) -> Verdict:
    """A row for each op, its types and its device, the worst first; then the cache."""
    kinds: dict[tuple[str, str, str], list[Checked]] = {}
    for op in found.ops:
        kinds.setdefault((op.op, op.types, op.device), []).append(op)
    rows = [_row(*kind, of) for kind, of in kinds.items()]
    rows.sort(key=lambda row: -_excess(row))
    columns = [
        Column("op"),
        Column("sources"),
        Column("device"),
        Column("checked", "count"),
        Column("largest error", "number"),
        Column("tolerance", "number"),
        Column("at"),
        Column("verdict"),
    ]
    if all(op.device == "CPU" for op in found.ops):
        del columns[2]
        rows = [[*row[:2], *row[3:]] for row in rows]
    unknown = sorted({str(row[0]) for row in rows if row[-1] == "not checked"})
    table = Report("Ops, each from the inputs that it had", columns, rows, labels=2, key="ops")
    table.notes.append(
        "The error is the normalized mean squared error against ONNX Runtime in float32; the"
        " tolerance is that of llama.cpp's test-backend-ops."
    )
    if unknown:
        table.notes.append(f"No standard operators express {', '.join(unknown)}.")
    n_faults = sum(op.is_fault for op in found.ops)
    table.notes.append(f"Of {counted(len(found.ops), 'op')}, {n_faults:,} beyond the tolerance.")
    if any(row[-1] == "rounding" for row in rows):
        table.notes.append(
            "rounding: ggml rounds activations to 8 bits before a product with quantized weights;"
            " with the same rounding the error is within the tolerance."
        )
    table.figures = {"checked": (len(found.ops), "count"), "faults": (n_faults, "count")}
    reports = [table]
    if found.whole is not None:
        reports.append(_whole(found.whole, any(map(_rounds, found.ops))))
    worst = max(found.cache, default=None)
    if worst is not None:
        reports.append(_cache(found.cache, worst))
    passed = all(row[-1] != "fault" for report in reports for row in report.rows)
    return Verdict(reports, passed)


def _row(op: str, types: str, device: str, of: Sequence[Checked]) -> list[Cell]:
    known = [(one.error / one.tolerance, one) for one in of if one.error is not None]
    if not known:
        return [op, types, device, len(of), None, None, None, "not checked"]
    faults = [(ratio, one) for ratio, one in known if one.is_fault]
    ratio, worst = max(faults or known, key=lambda pair: pair[0])
    verdict = "fault" if faults else "rounding" if ratio > 1 else "ok"
    return [op, types, device, len(of), worst.error, worst.tolerance, worst.name, verdict]


def _excess(row: Sequence[Cell]) -> float:
    error, tolerance = row[4], row[5]
    if not isinstance(error, float) or not isinstance(tolerance, float):
        return -1.0
    return error / tolerance


def _rounds(op: Checked) -> bool:
    """Whether its kernel rounds activations to 8 bits."""
    return op.op.startswith("MUL_MAT") and rounds(op.types.split(", ")[0])


def _whole(whole: Whole, rounded: bool) -> Report:
    columns = [Column("error", "number"), Column("tolerance", "number"), Column("verdict")]
    title = "Logits of the prompt against the whole graph in ONNX Runtime"
    if whole.error is None:
        report = Report(title, columns, [[None, None, "not checked"]], key="prompt")
        report.notes.append(f"The graph was not computed: {whole.reason}.")
        return report
    within = whole.error <= OF_LOGITS
    explained = rounded and whole.error <= ROUNDED * OF_LOGITS
    verdict = "ok" if within else "rounding" if explained else "fault"
    report = Report(title, columns, [[whole.error, OF_LOGITS, verdict]], key="prompt")
    report.figures = {"error": (whole.error, "number")}
    if verdict == "rounding":
        report.notes.append(
            "rounding: ggml rounds activations to 8 bits before products with quantized weights,"
            f" which the graph does not. Up to {ROUNDED} times the tolerance is allowed for it."
        )
    return report


def _cache(errors: Sequence[float], worst: float) -> Report:
    columns = [
        Column("decode", "count"),
        Column("error", "number"),
        Column("tolerance", "number"),
        Column("verdict"),
    ]
    rows: list[list[Cell]] = [
        [i + 1, error, OF_LOGITS, "ok" if error <= OF_LOGITS else "fault"]
        for i, error in enumerate(errors)
    ]
    title = "Logits with the cache against one pass without it"
    report = Report(title, columns, rows, key="cache")
    report.figures = {"largest error": (worst, "number")}
    return report
