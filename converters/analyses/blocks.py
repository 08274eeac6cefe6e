"""The contents of the blocks of a quantized tensor, all fields of one block, and a picture of the
tensor: rows by blocks, coloured by scale or by error.

Invariant: codes are shown as stored, together with their level. Numbers that are not finite are
text, so that the JSON is valid. The same tensor gives the same bytes of a picture, whatever the
user's settings of matplotlib are, and no part of a tensor's name is rendered as a formula.
"""

from __future__ import annotations

import math
import warnings
from pathlib import PurePath
from typing import Any, BinaryIO

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import counted, printable
from llamacpp_instr.converters.analyses.tables import header
from llamacpp_instr.lab.weights.blocks import LAYOUTS, CodeRange, OneBlock
from llamacpp_instr.lab.weights.statistics import BlockStats, CodeCounts, Errors, Grid
from llamacpp_instr.model.file import Weight
from llamacpp_instr.report.charts import import_matplotlib, norm_of
from llamacpp_instr.report.report import Cell, Figures, Report

FEW_LEVELS = 4
MOST_CODES = 64
"""rows of a histogram for a reader; a script gets one row per code"""
FORMS = ("png", "svg")
LONGEST_NAME = 60


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
        reports.append(_worst_report(stats, stats.errors, reference))
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
    columns = header(
        "Field", "Holds", ("count", "Bytes"), ("number", "Bits per weight"), ("share", "Share")
    )
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
    begins = np.arange(0, len(counts), together)
    summed = np.add.reduceat(counts, begins).tolist()
    n, highest = sum(summed), max(summed)
    rows: list[list[Cell]] = []
    for first, count in zip(begins.tolist(), summed, strict=True):
        last = min(first + together, len(counts)) - 1
        code = _span(codes.low + first, codes.low + last)
        level = _span(codes.levels[first], codes.levels[last])
        rows.append([code, level, count, count / n, count / highest])
    columns = header(
        "Code", "Level", ("count", "Count"), ("fraction", "Share"),
        ("share", "Of the most frequent"),
    )  # fmt: skip
    notes = ["The level is the value of the code before scaling; codes are shown as stored."]
    if together > 1:
        notes.append(f"A row has {together} consecutive codes; --json and --csv have each code.")
    return Report("Quants", columns, rows, notes)


def elements_report(block: OneBlock) -> Report:
    """The elements of a block: code, level, value and, with a reference, the error."""
    codes, values = block.blocks.parts.quants[0], block.blocks.values()[0]
    levels = block.blocks.layout.quants.levels_of(codes)
    size = len(codes) // block.blocks.n_sub
    rows: list[list[Cell]] = []
    for i, (code, level, value) in enumerate(zip(codes, levels, values, strict=True)):
        sub_block = i // size if block.blocks.n_sub > 1 else None
        theirs: list[Cell] = [None, None]
        if block.reference is not None:
            reference = float(block.reference[i])
            theirs = [number(reference), number(float(value) - reference)]
        column = block.place[1] + i
        rows.append([i, sub_block, column, int(code), number(level), number(value), *theirs])
    columns = header(
        ("count", "Element", "Sub-block", "Column", "Code"),
        ("number", "Level", "Value", "Reference", "Error"),
    )
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
    columns = header(
        "Field", ("count", "Count"), ("number", "Least", "Median", "Largest"),
        ("count", "Zero", "Denormal", "Not finite"),
    )  # fmt: skip
    scale = "scale" if stats.d is None else "d" if stats.scales is None else "d x scale"
    added = ""
    if stats.dmin is not None:
        added = " - dmin x min" if layout.mins is not None else " + m"
    return Report("Scales", columns, rows, [f"An element is {scale} x level{added}."])


def _levels_row(name: str, counts: CodeCounts) -> list[Cell]:
    levels = np.array(counts.codes.levels)
    order = np.argsort(levels, kind="stable")
    up_to = counts.counts[order].cumsum()
    seen = levels[order][counts.counts[order] > 0]
    median = levels[order][np.searchsorted(up_to, (counts.n + 1) // 2)]
    values = map(number, (seen[0], median, seen[-1]))
    return [name, counts.n, *values, counts.n_zero, None, None]


def _saturation_report(stats: BlockStats) -> Report:
    quants, low, high = stats.quants, *_ends(stats.quants.codes)
    found = [
        (f"quants at the least level, {low}", quants.n_lowest, quants.n),
        (f"quants at the largest level, {high}", quants.n_highest, quants.n),
    ]
    for name, counts in (("scales", stats.scales), ("minima", stats.mins)):
        if counts is None:
            continue
        low, high = _ends(counts.codes)
        if counts.codes.ends[0] < 0:
            found.append((f"{name} at the least, {low}", counts.n_lowest, counts.n))
        found.append((f"{name} at the largest, {high}", counts.n_highest, counts.n))
        found.append((f"{name} of zero", counts.n_zero, counts.n))
    rows: list[list[Cell]] = [[what, count, n, count / n] for what, count, n in found]
    note = "The largest weight of a block sets its scale, so some quants are always at an end."
    if len(set(quants.codes.levels)) <= FEW_LEVELS:
        note = "With so few levels many quants are at an end; that alone is not a loss."
    columns = header("What", ("count", "Count", "Of"), ("share", "Share"))
    return Report("Saturation", columns, rows, [note])


def _ends(codes: CodeRange) -> tuple[str, str]:
    return f"{codes.ends[0]:g}", f"{codes.ends[1]:g}"


def _worst_report(stats: BlockStats, errors: Errors, reference: str) -> Report:
    block = stats.weight.type.block
    rows: list[list[Cell]] = [
        [
            worst.block, *_row(stats.weight, worst.row), _columns(worst.column, block),
            number(worst.rmse), number(worst.max_error),
            number(worst.rmse / errors.rmse) if errors.rmse else None,
        ]
        for worst in errors.worst
        if worst.rmse != 0
    ]  # fmt: skip
    columns = header(
        ("count", "Block", "Matrix", "Row"), "Columns",
        ("number", "RMSE", "Largest error", "Times the tensor's"),
    )  # fmt: skip
    notes = [f"RMSE of the tensor: {errors.rmse:.5g}, against {printable(reference)}."]
    if errors.non_finite:
        notes.append(f"{errors.non_finite:,} elements that are NaN or infinite were excluded.")
    notes.append("See one of them with --block." if rows else "Every value equals the reference's.")
    figures: Figures = {"RMSE of the tensor": (number(errors.rmse), "number")}
    return Report("Worst blocks", columns, rows, notes, figures=figures)


def _bytes_report(block: OneBlock) -> Report:
    parts = block.blocks.parts
    numbers = {"d": parts.d, "dmin": parts.dmin, "m": parts.dmin, "e": parts.d}
    rows: list[list[Cell]] = []
    for field in block.blocks.layout.fields:
        values = numbers.get(field.name)
        value = number(values[0]) if values is not None else None
        raw = block.raw[field.name].hex(" ")
        rows.append([field.name, field.holds, field.n_bytes, value, raw])
    columns = header("Field", "Holds", ("count", "Bytes"), ("number", "Value"), "Hex")
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
            i, _columns(block.place[1] + i * size, size),
            int(parts.scales[0, i]) if parts.scales is not None else None,
            number(steps[i]),
            int(parts.mins[0, i]) if parts.mins is not None else None,
            number(offsets[0, i]) if offsets is not None else None,
            _span(int(quants[i].min()), int(quants[i].max())), rmse,
        ])  # fmt: skip
    columns = header(
        ("count", "Sub-block"), "Columns", ("count", "Scale"), ("number", "Factor"),
        ("count", "Minimum"), ("number", "Added"), "Codes", ("number", "RMSE"),
    )  # fmt: skip
    notes = [f"An element is factor x level{' + what is added' if offsets is not None else ''}."]
    scales = blocks.layout.scales
    if scales is not None and (zero := scales.low + scales.levels.index(0)):
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


# --- the picture ---


def check_heat_map(path: str) -> None:
    """Raises `UsageError` if no picture can be written with that name."""
    if _form(path) not in FORMS:
        raise UsageError(f"{path}: use a name that ends in .png or .svg")
    need("report")


def write_heat_map(file: BinaryIO, stats: BlockStats, path: str) -> None:
    """Draws the errors of a tensor's sub-blocks, or their scales without a reference.

    The suffix of `path` selects PNG or SVG. Rows are those of the tensor, and blocks are drawn from
    left to right. If there are too many, a cell shows the largest error or the mean scale.
    """
    matplotlib = import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    own = {"svg.hashsalt": "llamacpp-instr", "svg.fonttype": "none"}
    settings = {**matplotlib.rcParamsDefault, **own}
    settings.pop("backend", None)
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # characters that the font lacks are drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph")
        figure = Figure(figsize=(8, 6), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        _draw(figure, stats, matplotlib.colormaps["viridis"].with_extremes(bad="red"))
        form = _form(path)
        metadata = {"Software": None} if form == "png" else {"Date": None, "Creator": None}
        figure.savefig(file, format=form, metadata=metadata)


def _form(path: str) -> str:
    return PurePath(path).suffix.lower().removeprefix(".")


def _draw(figure: Any, stats: BlockStats, colours: Any) -> None:
    weight = stats.weight
    blocks_per_row = weight.ne[0] // weight.type.block
    if stats.error_grid is not None:
        grid, what, joined, unit = stats.error_grid, "RMSE", "largest", "RMSE"
    else:
        grid, what, joined, unit = stats.scale_grid, "scale", "mean", "|d x scale|"
    n_sub = grid.sub_blocks_per_row // blocks_per_row
    if n_sub == 1:
        unit = unit.replace("d x scale", "d")
    if stats.d is None:
        unit = unit.replace("d x scale", "scale")
    unit += f" of a {'sub-block' if n_sub > 1 else 'block'} (units of the weights)"
    axes = figure.subplots()
    rows, columns = grid.cells.shape
    # the tick of a row or block is at its centre; the last cell may be incomplete
    right = columns * grid.sub_blocks_per_cell / n_sub - 0.5
    bottom = rows * grid.rows_per_cell - 0.5
    image = axes.imshow(
        np.ma.masked_invalid(grid.cells),
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        norm=norm_of(grid.cells),
        extent=(-0.5, right, bottom, -0.5),
    )
    axes.set_xlim(-0.5, blocks_per_row - 0.5)
    axes.set_ylim(grid.n_rows - 0.5, -0.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    name = printable(weight.name)
    if len(name) > LONGEST_NAME:
        name = name[: LONGEST_NAME - 1] + "…"
    shape = " x ".join(map(str, weight.ne))
    title = f"{name}\n{weight.type}, {shape}: {what} by row and block"
    axes.set_title(title, parse_math=False)
    block = f"block ({weight.type.block} elements"
    axes.set_xlabel(block + (f" in {n_sub} sub-blocks)" if n_sub > 1 else ")"))
    n_rows = weight.ne[1] if len(weight.ne) > 1 else 1
    axes.set_ylabel("row" if weight.n_rows == n_rows else f"row ({n_rows} of each matrix)")
    figure.colorbar(image, ax=axes, label=unit)
    if notes := _notes(grid, joined, n_sub):
        figure.supxlabel(notes, fontsize="small")


def _notes(grid: Grid, joined: str, n_sub: int) -> str:
    notes = []
    if grid.rows_per_cell > 1 or grid.sub_blocks_per_cell > 1:
        subs = "sub-blocks" if n_sub > 1 else "blocks"
        cells = f"{grid.rows_per_cell} x {grid.sub_blocks_per_cell} (rows x {subs})"
        notes.append(f"each cell is the {joined} of {cells}")
    if not np.isfinite(grid.cells).all():
        notes.append("red: not finite")
    return "; ".join(notes)
