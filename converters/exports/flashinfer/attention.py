"""FLASH_ATTN_EXT as the definitions of paged decodes and of ragged prefills.

A decode has one query for each request, and names the cells of the cache that it sees. A prefill
has several queries for each request, whose keys and values follow each other. What a mask shows is
a `View`; a log records it as positions (`views_of_log`), a capture by the mask itself
(`views_of_mask`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.converters.exports.flashinfer import references
from llamacpp_instr.converters.exports.flashinfer.definition import Axes, Definition, Tensor
from llamacpp_instr.converters.exports.flashinfer.references import with_values
from llamacpp_instr.converters.exports.flashinfer.use import GraphNodes, Use, dtype_of, type_tags
from llamacpp_instr.log.graph.attention import Attention, Ubatch, hiding, scope

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class View:
    """What consecutive queries of one request see: the cells, the last query's among them."""

    queries: int
    cells: Sequence[int]
    window: int = 0
    """how many cells a query sees at most, 0 without a limit; of a decode `cells` are cut"""
    causal: bool = True


@dataclass(frozen=True)
class Case:
    """A definition with all that a workload needs."""

    definition: Definition
    axes: Axes
    integers: dict[str, Int32]
    scalars: dict[str, float]


def attention(g: GraphNodes, node: int) -> Use | None:
    """The tensors of an attention; its definition depends on the masks of a compute (`case_of`).
    None with a bias by distance, which no definition has."""
    if g.params(node)["max_bias"]:
        return None
    q, k, v, *others = g.nodes.src[node]
    reads = {"q": q, "k": k, "v": v} | dict(zip(("mask", "sinks"), others, strict=False))
    base = Definition(f"attention {node}", "", "", {}, (), {}, {}, "")
    return Use(base, {}, (node,), reads, attention=True)


def case_of(g: GraphNodes, use: Use, views: Sequence[View]) -> Case:
    """The definition and the sizes of an attention whose queries see `views`."""
    (node,), q, k, v = use.nodes, *(use.reads[name] for name in "qkv")
    (dim, _, heads, _), (_, n_kv, kv_heads, streams), dim_v = g.ne(q), g.ne(k), g.ne(v)[0]
    found, sinks = g.params(node), "sinks" in use.reads
    cap = float(found["logit_softcap"])
    scale = {"sm_scale": float(found["scale"])}
    suffix = f"_softcap{cap:g}" * bool(cap) + "_sinks" * sinks
    inputs_of_sinks = {"sinks": Tensor(("num_qo_heads",))} if sinks else {}
    stored = g.type(k)
    tags = type_tags("cache", stored)
    dtype = dtype_of(stored)
    cells = [len(of.cells) for of in views]
    begins = {"kv_indptr": np.cumsum([0, *cells]).astype(np.int32)}
    fixed = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    if all(of.queries == 1 for of in views):
        paged: Axes = {
            "batch_size": len(views),
            "num_pages": n_kv * streams,
            "len_indptr": len(views) + 1,
            "num_kv_indices": sum(cells),
        }
        integers = begins | {"kv_indices": cells_of(views)}
        indices = {
            "kv_indptr": Tensor(("len_indptr",), "int32"),
            "kv_indices": Tensor(("num_kv_indices",), "int32"),
            "sm_scale": Tensor(None),
        }
        constraints = (
            "len_indptr == batch_size + 1",
            "num_kv_indices == kv_indptr[-1].item()",
        )
        if _is_latent(g, use):
            latent = _latent_decode(dim, dim_v, heads, dtype, indices, constraints, tags)
            return Case(latent, paged, integers, scale)
        values = "head_dim" if dim_v == dim else "value_dim"
        page = "num_pages", "page_size", "num_kv_heads"
        query = "batch_size", "num_qo_heads"
        definition = Definition(
            f"gqa_paged_decode_h{heads}_kv{kv_heads}_d{_dims(dim, dim_v)}_ps1{suffix}",
            "gqa_paged", "Decode of several requests over a cache of single cells.",
            _with_values_dim(fixed, dim, dim_v) | {"page_size": 1}, tuple(paged),
            {
                "q": Tensor((*query, "head_dim")),
                "k_cache": Tensor((*page, "head_dim"), dtype),
                "v_cache": Tensor((*page, values), dtype),
                **indices, **inputs_of_sinks,
            },
            {"output": Tensor((*query, values)), "lse": _lse("batch_size")},
            _source(references.DECODE, sinks, CAP=cap), dtype, tags, constraints,
        )  # fmt: skip
        return Case(definition, paged, integers, scale)
    window, causal = max(of.window for of in views), all(of.causal for of in views)
    queries = [of.queries for of in views]
    ragged: Axes = {
        "total_q": sum(queries),
        "total_kv": sum(cells),
        "len_indptr": len(views) + 1,
    }
    values = "head_dim" if dim_v == dim else "value_dim"
    definition = Definition(
        f"gqa_ragged_prefill{'_causal' * causal}_h{heads}_kv{kv_heads}_d{_dims(dim, dim_v)}"
        + f"_w{window}" * bool(window) + suffix,
        "gqa_ragged", "Prefill of several requests, whose keys follow each other.",
        _with_values_dim(fixed, dim, dim_v), tuple(ragged),
        {
            "q": Tensor(("total_q", "num_qo_heads", "head_dim")),
            "k": Tensor(("total_kv", "num_kv_heads", "head_dim"), dtype),
            "v": Tensor(("total_kv", "num_kv_heads", values), dtype),
            "qo_indptr": Tensor(("len_indptr",), "int32"),
            "kv_indptr": Tensor(("len_indptr",), "int32"),
            "sm_scale": Tensor(None), **inputs_of_sinks,
        },
        {"output": Tensor(("total_q", "num_qo_heads", values)), "lse": _lse("total_q")},
        _source(references.PREFILL, sinks, CAP=cap, CAUSAL=causal, WINDOW=window),
        dtype, tags, ("total_q == qo_indptr[-1].item()", "total_kv == kv_indptr[-1].item()"),
    )  # fmt: skip
    starts = {"qo_indptr": np.cumsum([0, *queries]).astype(np.int32)}
    return Case(definition, ragged, starts | begins, scale)


def views_of_log(of: Attention, ubatch: Ubatch | None) -> tuple[list[View], bool]:
    """What the queries of a recorded compute saw, and whether the log records it. Otherwise each
    query sees all cells of the window that the kernel was given, which is a bound."""
    bound = [
        View(of.rows, range(i * of.n_kv, (i + 1) * of.n_kv), causal=of.rows == 1)
        for i in range(of.streams)
    ]
    if ubatch is None:
        return bound, False
    seen, windows = scope(of, ubatch)
    shown = {(one.spans, hiding(ubatch, one, window)) for one in seen for window in windows}
    (spans, window), *others = shown or {((), None)}
    if others or window is None or sum(span.n for span in spans) != of.rows * of.streams:
        return bound, False
    views = []
    at = 0
    for span in spans:
        end = span.first + span.n
        low = max(0, span.first + 1 - window) if window else 0
        views.append(View(span.n, range(at, at + end - low), window, ubatch.causal))
        # requests share a cache, one behind the other as far as it goes
        at = at + end - low if at + end - low < of.n_kv else 0
    fits = all(view.cells[-1] < of.n_kv * of.streams for view in views if view.cells)
    return (views, True) if fits else (bound, False)


def cells_of(views: Sequence[View]) -> Int32:
    """The cells of all requests, one request behind the other."""
    return np.concatenate([np.asarray(of.cells, np.int32) for of in views])


def views_of_mask(visible: NDArray[np.bool_]) -> list[View]:
    """What each row of a mask shows, (queries, cells): prefills where each row sees what the one
    before saw and its own cell, with or without a window; otherwise rows of their own."""
    rows = [np.flatnonzero(row) for row in visible]
    views: list[View] = []
    begin = 0
    while begin < len(rows):
        end = begin + 1
        while end < len(rows) and _follows(rows, end):
            end += 1
        views.append(_view(rows[begin:end]))
        begin = end
    if all(view.causal and view.window == 0 for view in views):
        return views
    if len({(view.causal, view.window) for view in views}) == 1:
        return views
    return [View(1, tuple(row.tolist())) for row in rows]


def _follows(rows: Sequence[NDArray[Any]], row: int) -> bool:
    """Whether a row sees one cell more than the row before, which is behind the others, at most
    without the first; or the same cells."""
    before, own = rows[row - 1], rows[row]
    if not len(before) or not len(own):
        return False
    if np.array_equal(before, own):
        return len(own) > 1
    if own[-1] <= before[-1]:
        return False
    return np.array_equal(own[:-1], before) or np.array_equal(own[:-1], before[1:])


def _view(rows: Sequence[NDArray[Any]]) -> View:
    cells = np.unique(np.concatenate(rows))
    whole = tuple(cells.tolist())
    if len(rows) == 1:
        return View(1, whole)
    if all(len(row) == len(cells) for row in rows):
        return View(len(rows), whole, causal=False)
    window = 0 if len(rows[-1]) == len(cells) else len(rows[-1])
    return View(len(rows), whole, window)


def _is_latent(g: GraphNodes, use: Use) -> bool:
    """Whether values are a part of the keys, as in multi-head latent attention."""
    k, v = use.reads["k"], use.reads["v"]
    return g.ne(k)[2] == 1 and g.ne(v)[0] < g.ne(k)[0] and g.base(k) == g.base(v)


def _latent_decode(
    dim: int,
    dim_v: int,
    heads: int,
    dtype: str,
    indices: dict[str, Tensor],
    constraints: tuple[str, ...],
    tags: frozenset[str],
) -> Definition:
    rotary = dim - dim_v
    query, page = ("batch_size", "num_qo_heads"), ("num_pages", "page_size")
    return Definition(
        f"mla_paged_decode_h{heads}_ckv{dim_v}_kpe{rotary}_ps1", "mla_paged",
        "Decode over a cache of latent keys and values, of single cells.",
        {
            "num_qo_heads": heads, "head_dim_ckv": dim_v, "head_dim_kpe": rotary, "page_size": 1,
        },
        ("batch_size", "num_pages", "len_indptr", "num_kv_indices"),
        {
            "q_nope": Tensor((*query, "head_dim_ckv")),
            "q_pe": Tensor((*query, "head_dim_kpe")),
            "ckv_cache": Tensor((*page, "head_dim_ckv"), dtype),
            "kpe_cache": Tensor((*page, "head_dim_kpe"), dtype),
            **indices,
        },
        {"output": Tensor((*query, "head_dim_ckv")), "lse": _lse("batch_size")},
        with_values(references.MLA_DECODE), dtype, tags, constraints,
    )  # fmt: skip


def _dims(dim: int, dim_v: int) -> str:
    return str(dim) if dim == dim_v else f"{dim}_dv{dim_v}"


def _with_values_dim(fixed: dict[str, int], dim: int, dim_v: int) -> dict[str, int]:
    return fixed if dim == dim_v else fixed | {"value_dim": dim_v}


def _lse(rows: str) -> Tensor:
    return Tensor((rows, "num_qo_heads"), about="log-sum-exp to the base of two")


def _source(source: str, sinks: bool, **values: float) -> str:
    """The reference, with or without sinks: scores without a value."""
    fields = {
        "sinks": ", sinks" * sinks,
        "with_sinks": "column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)\n"
        "    scores = torch.cat((scores, column), dim=-1)\n    " * sinks,
        "without_sinks": "[..., :-1]" * sinks,
    }
    return with_values(source.format(**fields), **values)
