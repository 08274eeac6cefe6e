"""The results of quantizations, side by side: bytes, bits per weight, and tensors that fell back to
another type.

Invariant: a report of plans and one of files that were written differ only in their title.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from llamacpp_instr.base.terminal import counted, printable
from llamacpp_instr.lab.quantize.plan import QuantizationPlan, row_length
from llamacpp_instr.report.report import Cell, Column, Report, columns_of


def quantization_reports(
    plans: Sequence[QuantizationPlan], paths: Sequence[Path], *, written: bool
) -> list[Report]:
    """A row per file, and the tensors that fell back; `paths` are those of the files, in order."""
    source = plans[0].source.name
    place = f" into {paths[0].parent}" if paths[0].parent != Path() else ""
    title = f"Quantized from {source}{place}" if written else f"What {source} would become"
    again = max(sum(tensor.requantized for tensor in plan.tensors) for plan in plans)
    notes = [f"Errors of {counted(again, 'tensor')} add up: quantized before."] if again else []
    sizes = Report(
        printable(title),
        [
            *columns_of("text", "file", "type"),
            Column("bytes", "count"),
            Column("bits/weight", "bits"),
            Column("of source", "fraction"),
            Column("fell back", "count"),
            Column("needs"),
        ],
        [
            [
                path.name if written else None,
                plan.file_type,
                plan.file_bytes,
                plan.bits_per_weight,
                plan.n_bytes / plan.source_bytes,
                len(plan.fallbacks),
                "imatrix" if plan.needs_imatrix else None,
            ]
            for plan, path in zip(plans, paths, strict=True)
        ],
        notes,
        key="files",
        figures={
            "source": (plans[0].source_bytes, "bytes"),
            "tensors quantized before": (again, "count"),
        },
    )
    if not written:
        # the first column is always shown
        sizes.columns.pop(0)
        for row in sizes.rows:
            row.pop(0)
    return [sizes, *_fallbacks(plans)]


def list_tensors(plans: Sequence[QuantizationPlan]) -> Report:
    """Every tensor of every file: its type before and after, and the intended type if it fell
    back."""
    columns = [Column(name) for name in ("type", "tensor", "shape", "from", "to", "meant")]
    rows: list[list[Cell]] = [
        [
            plan.file_type,
            tensor.name,
            "x".join(map(str, tensor.weight.ne)),
            tensor.weight.type.name,
            tensor.type.name,
            tensor.fallback_from.name if tensor.fallback_from else None,
            tensor.n_bytes,
        ]
        for plan in plans
        for tensor in plan.tensors
    ]
    return Report("Tensors", [*columns, Column("bytes", "bytes")], rows)


def _fallbacks(plans: Sequence[QuantizationPlan]) -> list[Report]:
    """Tensors whose rows the blocks of the intended type do not divide, grouped by the result."""
    rows: list[list[Cell]] = []
    for plan in plans:
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        lengths: dict[tuple[str, str], set[int]] = defaultdict(set)
        for tensor in plan.fallbacks:
            key = (str(tensor.fallback_from), str(tensor.type))
            groups[key].append(tensor.name)
            lengths[key].add(row_length(tensor.weight))
        for (meant, got), names in groups.items():
            of = ", ".join(map(str, sorted(lengths[meant, got])))
            rows.append([plan.file_type, meant, got, len(names), of, printable(names[0])])
    if not rows:
        return []
    columns = [Column("type"), Column("meant"), Column("got"), Column("tensors", "count")]
    columns += [Column("row length"), Column("first")]
    note = "Blocks of the intended type do not divide these rows: most types need multiples of 256."
    return [Report("Tensors that fall back to another type", columns, rows, [note])]
