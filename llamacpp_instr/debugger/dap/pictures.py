"""`instr/tensor`, our one request beside the protocol's: what a client needs to draw a tensor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import numpy as np

from llamacpp_instr.debugger.figures import figures_of, heat_map, histogram, parse_slice
from llamacpp_instr.debugger.tensors import Array

Cells = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class TensorArguments(msgspec.Struct, rename="camel"):
    """The result of the op, or the tensor called `name`; of it a `slice` as `[3, :8]`."""

    name: str | None = None
    slice: str = ""
    rows: Cells = 64
    columns: Cells = 256
    bins: Cells = 40


def picture(wanted: TensorArguments, values: Array) -> dict[str, Any]:
    """Figures, histogram and heat map of a tensor's `values`, of which the client wants a part.

    `heatMap.cells` has a list for each row of cells; a cell is the value furthest from zero, null
    for NaN and infinity. Edges are numbers of rows and columns of the matrix, or values. Raises
    `UsageError` for a wrong slice.
    """
    part = np.atleast_1d(values[parse_slice(wanted.slice, values.shape)])
    counted, seen = histogram(part, wanted.bins), heat_map(part, wanted.rows, wanted.columns)
    return {
        "shape": list(part.shape),
        "figures": asdict(figures_of(part)),
        "histogram": {"edges": counted.edges.tolist(), "counts": counted.counts.tolist()},
        "heatMap": {
            "cells": seen.cells.tolist(),
            "rowEdges": seen.row_edges.tolist(),
            "columnEdges": seen.column_edges.tolist(),
        },
    }
