"""The tensors of one use of a definition, in the shapes that the definition gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacpp_instr.converters.exports.flashinfer.attention import (
    Case,
    View,
    case_of,
    cells_of,
    views_of_mask,
)
from llamacpp_instr.converters.exports.flashinfer.dataset import OUTPUT
from llamacpp_instr.converters.exports.flashinfer.use import GraphNodes, Use
from llamacpp_instr.converters.exports.flashinfer.workloads import simple_case
from llamacpp_instr.converters.exports.onnx.tensors import Tensors

Array = npt.NDArray[Any]
ValueOf = Callable[[int], Array]
"""the values of a tensor that has memory of its own"""


def value_at(tensors: Tensors, tensor: int, value_of: ValueOf) -> Array:
    """The values of a tensor, of four dimensions: of a view, what it shows."""
    place = tensors.place(tensor)
    whole = np.ascontiguousarray(value_of(place.base)).ravel()[place.offset :]
    strides = [n * whole.itemsize for n in place.strides]
    view = np.lib.stride_tricks.as_strided(whole, place.shape, strides, writeable=False)
    copied: Array = view.copy()
    return copied


def arrays_of_use(
    g: GraphNodes, tensors: Tensors, use: Use, value_of: ValueOf
) -> tuple[Case, dict[str, Array]]:
    """The case of a use that has been computed, and its inputs and its output."""
    values = {name: value_at(tensors, tensor, value_of) for name, tensor in use.reads.items()}
    output = value_at(tensors, use.nodes[-1], value_of)
    if use.attention:
        return _of_attention(g, tensors, use, values, output)
    definition, case = use.definition, simple_case(use.definition, use)
    arrays = {
        name: _typed(values[name].reshape(definition.shape(name, use.axes)), of.dtype)
        for name, of in definition.inputs.items()
    }
    (name, of), *_ = definition.outputs.items()
    shape = definition.shape(name, use.axes)
    # ARGSORT gives the order of all; only the first are used
    rows = output.reshape(shape[0], -1)[:, : shape[1]] if name == "indices" else output
    return case, arrays | {OUTPUT + name: _typed(rows.reshape(shape), of.dtype)}


def _of_attention(
    g: GraphNodes, tensors: Tensors, use: Use, values: dict[str, Array], output: Array
) -> tuple[Case, dict[str, Array]]:
    q, k, v = (_rows_first(values[name]) for name in "qkv")
    streams, n_kv = values["k"].shape[0], values["k"].shape[2]
    n_rows = len(q) // streams
    visible = np.ones((streams, n_rows, n_kv), np.bool_)
    if "mask" in values:
        mask = values["mask"][:, 0, :n_rows]
        visible = np.broadcast_to(mask > -np.inf, visible.shape)
    views = [
        View(of.queries, [cell + i * n_kv for cell in of.cells], of.window, of.causal)
        for i in range(streams)
        for of in views_of_mask(visible[i])
    ]
    case = case_of(g, use, views)
    arrays: dict[str, Array] = dict(case.integers)
    inputs = case.definition.inputs
    if "ckv_cache" in inputs:
        dim_v = v.shape[2]
        behind = tensors.place(use.reads["v"]).offset > tensors.place(use.reads["k"]).offset
        latent = slice(-dim_v, None) if behind else slice(dim_v)
        rotary = slice(-dim_v) if behind else slice(dim_v, None)
        arrays |= {"q_nope": q[..., latent], "q_pe": q[..., rotary]}
        arrays |= {"ckv_cache": k[..., latent], "kpe_cache": k[..., rotary]}
    elif "k_cache" in inputs:
        arrays |= {"q": q, "k_cache": k[:, None], "v_cache": v[:, None]}
    else:
        cells = cells_of(views)
        arrays |= {"q": q, "k": k[cells], "v": v[cells]}
    if "sinks" in inputs:
        arrays["sinks"] = values["sinks"].reshape(-1)
    arrays = {name: _typed(of, inputs[name].dtype) for name, of in arrays.items()}
    # the result has heads before tokens
    arrays[f"{OUTPUT}output"] = output.reshape(len(q), -1, v.shape[2])
    return case, arrays


def _rows_first(values: Array) -> Array:
    """(streams, heads, rows, width) as (streams and rows, heads, width)."""
    streams, heads, n_rows, width = values.shape
    rows: Array = values.transpose(0, 2, 1, 3).reshape(streams * n_rows, heads, width)
    return rows


def _typed(values: Array, dtype: str) -> Array:
    typed: Array = np.ascontiguousarray(values, dtype)
    return typed
