"""The contents of the blocks of a quantized tensor, and all fields of one block, as reports.

Invariant: codes are shown as stored, together with their level. Numbers that are not finite are
text, so that the JSON is valid.
"""

from __future__ import annotations

import math

import numpy as np

from llamacpp_instr.base.terminal import counted, printable
from llamacpp_instr.lab.weights.blocks import LAYOUTS, CodeRange, OneBlock
from llamacpp_instr.lab.weights.statistics import BlockStats, CodeCounts
from llamacpp_instr.model.file import Weight
from llamacpp_instr.report.report import Cell, Column, Figures, Report, columns_of

FEW_LEVELS = 4
MOST_CODES = 64
"""rows of a histogram for a reader; a script gets one row per code"""


def tensor_reports(
    stats: BlockStats, reference: str | None = None, most_codes: int | None = MOST_CODES
) -> list[Report]:
    """The tensor's fields, scales, saturation, histogram and, if `reference` names one, its worst
    blocks. With `most_codes` None, the histogram has one row per code."""
    reports = [
        fields_report(stats),
        _scales_report(stats),
        _saturation_report(stats),
        histogram_report(stats, most_codes),
    ]
    if reference is not None and stats.errors is not None:
        reports.append(_worst_report(stats, reference))
    else:
        reports[-1].notes.append("With --reference FILE.gguf also its error, block by block.")
    return reports


def block_reports(block: OneBlock, reference: str | None = None) -> list[Report]:
    """A block's bytes by field, its sub-blocks, and its elements, with those of a reference."""
    reports = [_bytes_report(block), _sub_blocks_report(block), elements_report(block)]
    if reference is not None:
        reports[-1].notes.append(f"The reference is {printable(reference)}.")
    return reports


def fields_report(stats: BlockStats) -> Report:
    """The fields of a block, and their bits per weight."""
    weight, type_ = stats.weight, stats.weight.type
    layout = LAYOUTS[type_.name]
    rows: list[list[Cell]] = [
        [field.name, field.holds, field.n_bytes, 8 * field.n_bytes / type_.block,
         field.n_bytes / type_.block_bytes]
        for field in layout.fields
    ]  # fmt: skip
    rows.append(["block", "", type_.block_bytes, type_.bits_per_weight, 1.0])
    columns = [
        Column("Field"), Column("Holds"), Column("Bytes", "count"),
        Column("Bits per weight", "number"), Column("Share", "share"),
    ]  # fmt: skip
    notes = [
        f"{weight.n_bytes:,} bytes in {counted(stats.n_blocks, 'block')}"
        f" of {counted(type_.block, 'element')}."
    ]
    if layout.sub_block:
        both = "a scale and a minimum" if layout.mins is not None else "a scale"
        n = type_.block // layout.sub_block
        notes.append(f"A block has {n} sub-blocks of {layout.sub_block}, each with {both}.")
    figures: Figures = {
        "bytes": (weight.n_bytes, "bytes"),
        "blocks": (stats.n_blocks, "count"),
        "elements of a block": (type_.block, "count"),
    }
    title = f"{weight.name} ({weight.type}, {' x '.join(map(str, weight.ne))})"
    return Report(title, columns, rows, notes, figures=figures, key="tensor")


def histogram_report(stats: BlockStats, most: int | None = None) -> Report:
    """How often each code occurs; neighbours are combined if there are more than `most` codes."""
    codes, counts = stats.quants.codes, stats.quants.counts
    together = -(-len(counts) // most) if most is not None else 1
    summed = [int(part.sum()) for part in np.split(counts, range(together, len(counts), together))]
    n, highest = sum(summed), max(summed)
    rows: list[list[Cell]] = []
    for i, count in enumerate(summed):
        first, last = i * together, min((i + 1) * together, len(counts)) - 1
        rows.append([
            _span(codes.low + first, codes.low + last),
            _span(codes.levels[first], codes.levels[last]),
            count, count / n, count / highest,
        ])  # fmt: skip
    columns = [
        Column("Code"), Column("Level"), Column("Count", "count"), Column("Share", "fraction"),
        Column("Of the most frequent", "share"),
    ]  # fmt: skip
    notes = ["The level is the value of the code before scaling; codes are shown as stored."]
    if together > 1:
        notes.append(f"A row has {together} consecutive codes; --json and --csv have each code.")
    return Report("Quants", columns, rows, notes)


def elements_report(block: OneBlock) -> Report:
    """The elements of a block: code, level, value and, with a reference, the error."""
    codes, values = block.blocks.parts.quants[0], block.blocks.values()[0]
    levels = block.blocks.layout.quants.levels_of(codes)
    _, column = block.place
    size = len(codes) // block.blocks.n_sub
    rows: list[list[Cell]] = []
    for i, (code, level, value) in enumerate(zip(codes, levels, values, strict=True)):
        sub_block = i // size if block.blocks.n_sub > 1 else None
        row: list[Cell] = [i, sub_block, column + i, int(code), number(level), number(value)]
        if block.reference is None:
            row += [None, None]
        else:
            theirs = float(block.reference[i])
            row += [number(theirs), number(float(value) - theirs)]
        rows.append(row)
    columns = [
        *columns_of("count", "Element", "Sub-block", "Column", "Code"),
        *columns_of("number", "Level", "Value", "Reference", "Error"),
    ]
    return Report("Elements", columns, rows)


def number(value: float) -> Cell:
    """A number as a cell; as text if JSON cannot represent it."""
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _scales_report(stats: BlockStats) -> Report:
    layout = LAYOUTS[stats.weight.type.name]
    rows: list[list[Cell]] = []
    for name, spread in (("d", stats.d), ("dmin" if layout.mins else "m", stats.dmin)):
        if spread is not None:
            values = map(number, (spread.least, spread.median, spread.largest))
            zeros = spread.n_zero, spread.n_denormal, spread.n_non_finite
            rows.append([name, spread.n, *values, *zeros])
    for name, counts in (("scales", stats.scales), ("mins", stats.mins)):
        if counts is not None:
            rows.append(_levels_row(name, counts))
    columns = [
        Column("Field"), Column("Count", "count"), Column("Least", "number"),
        Column("Median", "number"), Column("Largest", "number"), Column("Zero", "count"),
        Column("Denormal", "count"), Column("Not finite", "count"),
    ]  # fmt: skip
    return Report("Scales", columns, rows, [_formula(stats)])


def _formula(stats: BlockStats) -> str:
    layout = LAYOUTS[stats.weight.type.name]
    scale = "d x scale" if stats.scales is not None else "d"
    if stats.d is None:
        scale = "scale"
    added = {(True, True): " - dmin x min", (True, False): " + m"}.get(
        (stats.dmin is not None, layout.mins is not None), ""
    )
    return f"An element is {scale} x level{added}."


def _levels_row(name: str, counts: CodeCounts) -> list[Cell]:
    levels = np.array(counts.codes.levels)
    order = np.argsort(levels, kind="stable")
    up_to = counts.counts[order].cumsum()
    seen = levels[order][counts.counts[order] > 0]
    median = levels[order][np.searchsorted(up_to, (counts.n + 1) // 2)]
    return [
        name, counts.n, number(seen[0]), number(median), number(seen[-1]), counts.n_zero,
        None, None,
    ]  # fmt: skip


def _saturation_report(stats: BlockStats) -> Report:
    rows: list[list[Cell]] = []

    def add(what: str, count: int, n: int) -> None:
        rows.append([what, count, n, count / n])

    quants, low, high = stats.quants, *_ends(stats.quants.codes)
    add(f"quants at the least level, {low}", quants.n_lowest, quants.n)
    add(f"quants at the largest level, {high}", quants.n_highest, quants.n)
    for name, counts in (("scales", stats.scales), ("minima", stats.mins)):
        if counts is None:
            continue
        low, high = _ends(counts.codes)
        if counts.codes.ends[0] < 0:
            add(f"{name} at the least, {low}", counts.n_lowest, counts.n)
        add(f"{name} at the largest, {high}", counts.n_highest, counts.n)
        add(f"{name} of zero", counts.n_zero, counts.n)
    columns = [Column("What"), *columns_of("count", "Count", "Of"), Column("Share", "share")]
    note = "The largest weight of a block sets its scale, so some quants are always at an end."
    if len(set(quants.codes.levels)) <= FEW_LEVELS:
        note = "With so few levels many quants are at an end; that alone is not a loss."
    return Report("Saturation", columns, rows, [note])


def _ends(codes: CodeRange) -> tuple[str, str]:
    return f"{codes.ends[0]:g}", f"{codes.ends[1]:g}"


def _worst_report(stats: BlockStats, reference: str) -> Report:
    errors, block = stats.errors, stats.weight.type.block
    assert errors is not None
    rows: list[list[Cell]] = [
        [
            worst.block, *_row(stats.weight, worst.row), _columns(worst.column, block),
            number(worst.rmse), number(worst.max_error),
            number(worst.rmse / errors.rmse) if errors.rmse else None,
        ]
        for worst in errors.worst
        if worst.rmse != 0
    ]  # fmt: skip
    columns = [
        *columns_of("count", "Block", "Matrix", "Row"),
        Column("Columns"),
        *columns_of("number", "RMSE", "Largest error", "Times the tensor's"),
    ]
    notes = [f"RMSE of the tensor: {errors.rmse:.5g}, against {printable(reference)}."]
    if errors.non_finite:
        notes.append(f"{errors.non_finite:,} elements that are NaN or infinite were excluded.")
    notes.append("See one of them with --block." if rows else "Every value equals the reference's.")
    figures: Figures = {"RMSE of the tensor": (number(errors.rmse), "number")}
    return Report("Worst blocks", columns, rows, notes, figures=figures)


def _bytes_report(block: OneBlock) -> Report:
    parts, layout = block.blocks.parts, block.blocks.layout
    numbers = {"d": parts.d, "dmin": parts.dmin, "m": parts.dmin, "e": parts.d}
    rows: list[list[Cell]] = []
    for field in layout.fields:
        values = numbers.get(field.name)
        rows.append([
            field.name, field.holds, field.n_bytes,
            number(values[0]) if values is not None else None,
            block.raw[field.name].hex(" "),
        ])  # fmt: skip
    columns = [
        Column("Field"), Column("Holds"), Column("Bytes", "count"), Column("Value", "number"),
        Column("Hex"),
    ]  # fmt: skip
    weight = block.weight
    matrix, row = _row(weight, block.place[0])
    title = f"Block {block.index} of {weight.name} ({weight.type}):"
    title += f" matrix {matrix}," if matrix is not None else ""
    title += f" row {row}, columns {_columns(block.place[1], weight.type.block)}"
    notes = [f"It begins at byte {block.offset:,} of its file."]
    figures: Figures = {"offset": (block.offset, "bytes")}
    return Report(title, columns, rows, notes, figures=figures, key="block")


def _sub_blocks_report(block: OneBlock) -> Report:
    blocks, parts = block.blocks, block.blocks.parts
    steps, offsets = blocks.steps()[0], blocks.offsets()
    values = blocks.values()[0].reshape(blocks.n_sub, -1)
    quants = parts.quants[0].reshape(blocks.n_sub, -1)
    size = values.shape[1]
    _, column = block.place
    rows: list[list[Cell]] = []
    for i in range(blocks.n_sub):
        rmse: Cell = None
        if block.reference is not None:
            theirs = block.reference.reshape(blocks.n_sub, -1)[i]
            with np.errstate(invalid="ignore"):
                error = values[i].astype(np.float64) - theirs
            error = error[np.isfinite(error)]
            rmse = number(np.sqrt(np.square(error).mean())) if error.size else None
        rows.append([
            i, _columns(column + i * size, size),
            int(parts.scales[0, i]) if parts.scales is not None else None,
            number(steps[i]),
            int(parts.mins[0, i]) if parts.mins is not None else None,
            number(offsets[0, i]) if offsets is not None else None,
            _span(int(quants[i].min()), int(quants[i].max())), rmse,
        ])  # fmt: skip
    columns = [
        Column("Sub-block", "count"), Column("Columns"), Column("Scale", "count"),
        Column("Factor", "number"), Column("Minimum", "count"), Column("Added", "number"),
        Column("Codes"), Column("RMSE", "number"),
    ]  # fmt: skip
    added = " + what is added" if offsets is not None else ""
    notes = [f"An element is factor x level{added}."]
    scales = blocks.layout.scales
    zero = scales.low + scales.levels.index(0) if scales is not None else 0
    if zero:
        notes.append(f"Scales are shown as stored: {zero} means 0.")
    return Report("Sub-blocks" if blocks.n_sub > 1 else "Scale", columns, rows, notes)


def _row(weight: Weight, row: int) -> tuple[int | None, int]:
    """The matrix and the row in it; the matrix is None if the tensor has only one."""
    rows = weight.ne[1] if len(weight.ne) > 1 else 1
    return (row // rows, row % rows) if weight.n_rows > rows else (None, row)


def _columns(first: int, n: int) -> str:
    return f"{first}-{first + n - 1}"


def _span(first: float, last: float) -> str:
    return f"{first:g}" if first == last else f"{first:g} to {last:g}"
