"""A picture of a quantized tensor: rows by blocks, coloured by scale or by error.

Invariant: the same tensor gives the same bytes, whatever the user's settings of matplotlib are. No
part of a tensor's name is rendered as a formula.
"""

from __future__ import annotations

import warnings
from pathlib import PurePath
from typing import Any, BinaryIO

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import printable
from llamacpp_instr.lab.weights.statistics import BlockStats, Grid
from llamacpp_instr.report.charts import import_matplotlib, norm_of

FORMS = ("png", "svg")
LONGEST_NAME = 60


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

    settings = {
        **matplotlib.rcParamsDefault,
        "svg.hashsalt": "llamacpp-instr",
        "svg.fonttype": "none",
    }
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


def _draw(figure: Any, stats: BlockStats, colours: Any) -> None:
    weight = stats.weight
    blocks_per_row = weight.ne[0] // weight.type.block
    if stats.error_grid is not None:
        grid, what, joined = stats.error_grid, "RMSE", "largest"
        unit = "RMSE of a sub-block (units of the weights)"
    else:
        grid, what, joined = stats.scale_grid, "scale", "mean"
        unit = "|d x scale| of a sub-block (units of the weights)"
    n_sub = grid.sub_blocks_per_row // blocks_per_row
    if n_sub == 1:
        unit = unit.replace("d x scale", "d").replace("sub-block", "block")
    if stats.d is None:
        unit = unit.replace("d x scale", "scale")
    axes = figure.subplots()
    rows, columns = grid.cells.shape
    image = axes.imshow(
        np.ma.masked_invalid(grid.cells),
        aspect="auto",
        interpolation="nearest",
        cmap=colours,
        norm=norm_of(grid.cells),
        # the tick of a row or block is at its centre; the last cell may be incomplete
        extent=(
            -0.5,
            columns * grid.sub_blocks_per_cell / n_sub - 0.5,
            rows * grid.rows_per_cell - 0.5,
            -0.5,
        ),
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
    notes = _notes(grid, joined, n_sub)
    if notes:
        figure.supxlabel(notes, fontsize="small")


def _notes(grid: Grid, joined: str, n_sub: int) -> str:
    notes = []
    if grid.rows_per_cell > 1 or grid.sub_blocks_per_cell > 1:
        subs = "sub-blocks" if n_sub > 1 else "blocks"
        notes.append(
            f"each cell is the {joined} of {grid.rows_per_cell} x {grid.sub_blocks_per_cell} "
            f"(rows x {subs})"
        )
    if not np.isfinite(grid.cells).all():
        notes.append("red: not finite")
    return "; ".join(notes)


def _form(path: str) -> str:
    return PurePath(path).suffix.lower().removeprefix(".")
