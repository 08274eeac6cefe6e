"""What uses a definition in a graph. Each function takes a node and returns its use, or None if no
definition describes it.

The definition of FLASH_ATTN_EXT depends on the masks of a compute: it is that of a paged decode or
of a ragged prefill. A decode has one query for each request, and names the cells of the cache that
it sees. A prefill has several queries for each request, whose keys and values follow each other.
What a mask shows is a `View`; a log records it as positions (`views_of_log`), a capture by the mask
itself (`views_of_mask`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.converters.exports.flashinfer import references
from llamacpp_instr.converters.exports.flashinfer.definition import (
    Axes,
    Definition,
    Tensor,
    Use,
    dtype_of,
    type_tags,
)
from llamacpp_instr.converters.exports.flashinfer.references import FUNCTIONS, with_values
from llamacpp_instr.converters.exports.tensors import GATES, Tensors
from llamacpp_instr.log.graph.attention import Attention, Ubatch, hiding, scope
from llamacpp_instr.log.graph.ops import yarn

Int32 = NDArray[np.int32]
_SIGNS = {"ADD": "+", "SUB": "-", "MUL": "*", "DIV": "/"}
_VECTOR = Tensor(("batch_size", "hidden_size"))


def _use(
    nodes: tuple[int, ...],
    name: str,
    op_type: str,
    about: str,
    fixed: Axes,
    axes: Axes,
    inputs: dict[str, tuple[int, Tensor]],
    outputs: dict[str, Tensor],
    reference: str,
    variant: str = "",
    tags: frozenset[str] = frozenset(),
    **indices: int,
) -> Use:
    """The use of a definition by nodes; `inputs` also have the tensors of the graph."""
    tensors = {name: tensor for name, (_, tensor) in inputs.items()}
    definition = Definition(
        name, op_type, about, fixed, tuple(axes), tensors, outputs, reference, variant, tags
    )
    return Use(definition, axes, nodes, {name: of for name, (of, _) in inputs.items()}, indices)


def gemm(g: Tensors, node: int) -> Use | None:
    """A product with a weight; a weight of several matrices is multiplied batch by batch."""
    a, b = g.nodes.src[node][1], g.nodes.src[node][0]
    if not g.shows_weight(b):
        return None
    k, n, batch, others = g.ne(b)
    stored = g.type(b)
    weight = dtype_of(stored)
    batched = not batch == others == 1
    if batched and (others != 1 or g.ne(a)[2:] != (batch, 1)):
        return None
    first = ("batch",) if batched else ()
    return _use(
        (node,), f"batched_gemm_b{batch}_n{n}_k{k}" if batched else f"gemm_n{n}_k{k}", "gemm",
        "C = A @ B.T with a weight of the model as B; activations are float32.",
        dict.fromkeys(first, batch) | {"N": n, "K": k},
        {"M": g.ne(a)[1] if batched else g.rows(a)},
        {"A": (a, Tensor((*first, "M", "K"))), "B": (b, Tensor((*first, "N", "K"), weight))},
        {"C": Tensor((*first, "M", "N"))},
        with_values(references.BATCHED if batched else references.GEMM), weight,
        type_tags("weights", stored),
    )  # fmt: skip


def experts(g: Tensors, node: int) -> Use | None:
    """A product of each token with the experts that were chosen for it."""
    weights, x, ids = g.nodes.src[node][:3]
    if not g.shows_weight(weights):
        return None
    k, n, n_experts, _ = g.ne(weights)
    slots, tokens = g.ne(ids)[:2]
    own = g.ne(x)[1]
    dtype = dtype_of(g.type(weights))
    return _use(
        (node,), f"moe_gemm_e{n_experts}_t{slots}_n{n}_k{k}", "moe",
        "Each token times the matrices of its experts; one product of a mixture of experts.",
        {"N": n, "K": k, "num_experts": n_experts, "top_k": slots, "num_inputs": own},
        {"num_tokens": tokens},
        {
            "hidden_states": (x, Tensor(("num_tokens", "num_inputs", "K"))),
            "weights": (weights, Tensor(("num_experts", "N", "K"), dtype)),
            "expert_ids": (ids, Tensor(("num_tokens", "top_k"), "int32")),
        },
        {"output": Tensor(("num_tokens", "top_k", "N"))}, with_values(references.EXPERTS),
        f"in{own}_{dtype}", type_tags("weights", g.type(weights)), expert_ids=n_experts,
    )  # fmt: skip


def norm(g: Tensors, node: int) -> Use | None:
    """RMS_NORM with the product and the sum around it, or NORM alone. `node` is the norm."""
    (x,) = g.nodes.src[node]
    width, op = g.ne(node)[0], g.op(node)
    eps = float(g.params(node)["eps"])
    inputs, nodes = {"hidden_states": (x, _VECTOR)}, [node]
    name, about = f"rmsnorm_h{width}", f"RMSNorm; epsilon is {eps:.6g}."
    scaled, weight = _scaled(g, node)
    if op == "NORM":
        name = f"layernorm_h{width}"
        about = f"Layer norm without weight and bias; epsilon is {eps:.6g}."
    elif scaled is None:
        name += "_unscaled"
    else:
        nodes.append(scaled)
        if g.op(x) == "ADD" and _is_residual(g, x):
            a, b = g.nodes.src[x]
            inputs = {"hidden_states": (b, _VECTOR), "residual": (a, _VECTOR)}
            nodes.insert(0, x)
            name = f"fused_add_{name}"
            about = f"RMSNorm of a sum; epsilon is {eps:.6g}. The sum is also kept."
        inputs["weight"] = weight, Tensor(("hidden_size",))
    source = references.LAYERNORM
    if op == "RMS_NORM":
        source = references.RMSNORM.format(
            inputs=", ".join(inputs),
            x=" + ".join(f"{of}.float()" for of in inputs if of != "weight"),
            scaled=" * weight.float()" * ("weight" in inputs),
        )
    return _use(
        tuple(nodes), name, "rmsnorm" if op == "RMS_NORM" else "layernorm", about,
        {"hidden_size": width}, {"batch_size": g.rows(node)}, inputs, {"output": _VECTOR},
        with_values(source, EPS=eps), f"eps{eps:.6g}",
    )  # fmt: skip


def _scaled(g: Tensors, norm_: int) -> tuple[int | None, int]:
    """The product that alone reads a norm, and its weight."""
    after = norm_ + 1
    if after < len(g.nodes.op) and g.op(after) == "MUL" and g.readers[norm_] == 1:
        a, b = g.nodes.src[after]
        weight = b if a == norm_ else a
        if norm_ in (a, b) and g.shows_weight(weight) and g.rows(weight) == 1:
            return after, weight
    return None, 0


def _is_residual(g: Tensors, node: int) -> bool:
    a, b = g.nodes.src[node]
    return g.ne(a) == g.ne(b) and not g.shows_weight(a) and not g.shows_weight(b)


def rows(g: Tensors, node: int) -> Use | None:
    """The rows of a table by their numbers: an embedding, or a choice of tokens."""
    table, ids = g.nodes.src[node][:2]
    width, n, *others = g.ne(table)
    stored = g.type(table)
    if prod(others) != 1 or g.type(ids) != "i32" or stored in ("i32", "i64"):
        return None
    fixed, axes = {"embedding_dim": width}, {"num_tokens": g.rows(node)}
    if g.shows_weight(table):
        name, about = f"embedding_v{n}_d{width}", "Rows of the embedding."
        fixed["vocab_size"] = n
    else:
        name, about = f"gather_d{width}", "Rows of activations: the tokens whose output is needed."
        axes["vocab_size"] = n
    return _use(
        (node,), name, "embedding", about, fixed, axes,
        {
            "indices": (ids, Tensor(("num_tokens",), "int32")),
            "weight": (table, Tensor(("vocab_size", "embedding_dim"), dtype_of(stored))),
        },
        {"output": Tensor(("num_tokens", "embedding_dim"))}, with_values(references.ROWS),
        dtype_of(stored), type_tags("weights", stored), indices=n,
    )  # fmt: skip


def rope(g: Tensors, node: int) -> Use | None:
    """Queries or keys turned by their positions. Positions of images are not described."""
    found, (x, positions, *factors) = g.params(node), g.nodes.src[node]
    width, heads, tokens, others = g.ne(x)
    mode = str(found["mode"])
    if mode not in ("NORMAL", "NEOX") or others != 1 or found["n_offs"]:
        return None
    kept, magnitude = yarn(found)
    n_dims = int(found["n_dims"])
    source = references.ROPE.format(
        factors=", factors" * bool(factors), divided=" / factors.double()" * bool(factors)
    )
    # the shortest decimals that are the same in float32, as the model's file has it
    base, scale = (float(f"{found[name]:.9g}") for name in ("freq_base", "freq_scale"))
    values = {"WIDTH": n_dims, "BASE": base, "SCALE": scale, "MAGNITUDE": magnitude}
    turned = Tensor(("num_tokens", "num_heads", "head_dim"))
    inputs = {"x": (x, turned), "positions": (positions, Tensor(("num_tokens",), "int32"))}
    fixed = {"num_heads": heads, "head_dim": width}
    if factors:
        fixed["num_pairs"] = n_dims // 2
        inputs["factors"] = factors[0], Tensor(("num_pairs",))
    return _use(
        (node,), f"rope_h{heads}_d{width}", "rope",
        f"Rotary positions, base {base:.6g}, of {n_dims} of {width} numbers of a head.",
        fixed, {"num_tokens": tokens}, inputs, {"output": turned},
        with_values(source, **values, RAMP=kept.tolist(), NEOX=mode == "NEOX"),
        f"{mode.lower()}_w{n_dims}_b{base:.6g}_s{scale:.6g}" + "_factors" * bool(factors),
        positions=0,
    )  # fmt: skip


def activation(g: Tensors, node: int) -> Use | None:
    """A function of each element, or of a gate that is multiplied with another half."""
    sources, kind = g.nodes.src[node], str(g.params(node)["kind"])
    gated = g.op(node) == "GLU"
    function = GATES.get(kind, "") if gated else kind
    # two halves of one tensor are not described
    if function not in FUNCTIONS or (gated and len(sources) != 2):
        return None
    names = ("gate", "up") if gated else ("x",)
    about = "times the other input." if gated else "of each element."
    source = references.GATED if gated else references.UNARY
    width = g.ne(node)[0]
    return _use(
        (node,), f"{function.lower()}{'_and_mul' * gated}_h{width}", "activation",
        f"{function}{',' * gated} {about}", {"hidden_size": width}, {"batch_size": g.rows(node)},
        {name: (of, _VECTOR) for name, of in zip(names, sources, strict=True)},
        {"output": _VECTOR}, with_values(source.format(function=FUNCTIONS[function])),
    )  # fmt: skip


def softmax(g: Tensors, node: int) -> Use | None:
    """A softmax of rows without a mask, such as those of a router."""
    (x, *masks), scale = g.nodes.src[node], float(g.params(node)["scale"])
    if masks:
        return None
    width = g.ne(node)[0]
    return _use(
        (node,), f"softmax_d{width}", "softmax", "Softmax of rows.", {"hidden_size": width},
        {"batch_size": g.rows(node)}, {"x": (x, _VECTOR)}, {"output": _VECTOR},
        with_values(references.SOFTMAX, SCALE=scale), f"scale{scale:.6g}",
    )  # fmt: skip


def topk(g: Tensors, node: int) -> Use | None:
    """The indices of the largest values of a row. ARGSORT sorts all, and a view takes the first."""
    (x,), width = g.nodes.src[node], g.ne(g.nodes.src[node][0])[0]
    if g.op(node) == "ARGSORT":
        views = [i for i, of in enumerate(g.nodes.src) if node in of and g.op(i) == "VIEW"]
        if g.params(node)["order"] != "DESC" or len(views) != 1 or g.readers[node] != 1:
            return None
        k = g.ne(views[0])[0]
    else:
        k = g.ne(node)[0]
    return _use(
        (node,), f"topk_d{width}_k{k}", "topk", "The indices of the largest values of each row.",
        {"hidden_size": width, "k": k}, {"batch_size": g.rows(x)}, {"x": (x, _VECTOR)},
        {"indices": Tensor(("batch_size", "k"), "int32")}, with_values(references.TOPK, K=k),
    )  # fmt: skip


def elementwise(g: Tensors, node: int) -> Use | None:
    """A sum or a product of two tensors of one shape, or of rows with one row."""
    a, b = g.nodes.src[node][:2]
    op, width = g.op(node), g.ne(node)[0]
    if g.ne(a) == g.ne(b):
        other, name = _VECTOR, f"{op.lower()}_h{width}"
    elif g.ne(b) == (width, 1, 1, 1):
        other, name = Tensor(("hidden_size",)), f"{op.lower()}_row_h{width}"
    else:
        return None
    return _use(
        (node,), name, "elementwise", f"a {_SIGNS[op]} b", {"hidden_size": width},
        {"batch_size": g.rows(node)}, {"a": (a, _VECTOR), "b": (b, other)}, {"output": _VECTOR},
        with_values(references.ELEMENTWISE.format(sign=_SIGNS[op])),
    )  # fmt: skip


# --- attention ---


@dataclass(frozen=True)
class View:
    """What consecutive queries of one request see: the cells, the last query's among them."""

    queries: int
    cells: Sequence[int]
    window: int = 0
    """the most cells that a query sees, 0 without a limit; the `cells` of a decode are cut to it"""
    causal: bool = True


@dataclass(frozen=True)
class Case:
    """A definition with all that a workload needs."""

    definition: Definition
    axes: Axes
    integers: dict[str, Int32]
    scalars: dict[str, float]


def attention(g: Tensors, node: int) -> Use | None:
    """The tensors of an attention; its definition depends on the masks of a compute (`case_of`).
    None with a bias by distance, which no definition has."""
    if g.params(node)["max_bias"]:
        return None
    q, k, v, *others = g.nodes.src[node]
    reads = {"q": q, "k": k, "v": v} | dict(zip(("mask", "sinks"), others, strict=False))
    base = Definition(f"attention {node}", "", "", {}, (), {}, {}, "")
    return Use(base, {}, (node,), reads, attention=True)


def kind_of(g: Tensors, use: Use) -> tuple[Any, ...]:
    """Equal for uses of a graph that differ in their tensors only, such as those of its layers."""
    if not use.attention:
        return use.definition.name, use.definition.variant, *use.axes.items()
    shapes = tuple((g.ne(use.reads[name]), g.type(use.reads[name])) for name in "qkv")
    params = tuple(g.params(use.nodes[0]).items())
    return shapes, use.reads.get("mask"), params, "sinks" in use.reads


def case_of(g: Tensors, use: Use, views: Sequence[View]) -> Case:
    """The definition and the sizes of an attention whose queries see `views`."""
    (node,), q, k, v = use.nodes, *(use.reads[name] for name in "qkv")
    (dim, _, heads, _), (_, n_kv, kv_heads, streams), dim_v = g.ne(q), g.ne(k), g.ne(v)[0]
    found, sinks, dtype = g.params(node), "sinks" in use.reads, dtype_of(g.type(k))
    cap = float(found["logit_softcap"])
    suffix = f"_softcap{cap:g}" * bool(cap) + "_sinks" * sinks
    cells = [len(of.cells) for of in views]
    integers = {"kv_indptr": np.cumsum([0, *cells]).astype(np.int32)}
    fixed = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    dims, values = str(dim), "head_dim"
    if dim_v != dim:
        dims, values = f"{dim}_dv{dim_v}", "value_dim"
        fixed["value_dim"] = dim_v
    inputs: dict[str, Tensor]
    if all(of.queries == 1 for of in views):
        rows, kind = "batch_size", "gqa_paged"
        axes: Axes = {
            "batch_size": len(views),
            "num_pages": n_kv * streams,
            "len_indptr": len(views) + 1,
            "num_kv_indices": sum(cells),
        }
        constraints = (
            "len_indptr == batch_size + 1",
            "num_kv_indices == kv_indptr[-1].item()",
        )
        integers["kv_indices"] = cells_of(views)
        query, page = ("batch_size", "num_qo_heads"), ("num_pages", "page_size")
        if _is_latent(g, use):
            kind, values = "mla_paged", "head_dim_ckv"
            name = f"mla_paged_decode_h{heads}_ckv{dim_v}_kpe{dim - dim_v}_ps1"
            about = "Decode over a cache of latent keys and values, of single cells."
            source, sinks = with_values(references.MLA_DECODE), False
            fixed = {"num_qo_heads": heads, values: dim_v, "head_dim_kpe": dim - dim_v}
            inputs = {
                "q_nope": Tensor((*query, values)),
                "q_pe": Tensor((*query, "head_dim_kpe")),
                "ckv_cache": Tensor((*page, values), dtype),
                "kpe_cache": Tensor((*page, "head_dim_kpe"), dtype),
            }
        else:
            name = f"gqa_paged_decode_h{heads}_kv{kv_heads}_d{dims}_ps1{suffix}"
            about = "Decode of several requests over a cache of single cells."
            source = _source(references.DECODE, sinks, CAP=cap)
            inputs = {
                "q": Tensor((*query, "head_dim")),
                "k_cache": Tensor((*page, "num_kv_heads", "head_dim"), dtype),
                "v_cache": Tensor((*page, "num_kv_heads", values), dtype),
            }
        fixed["page_size"] = 1
        inputs["kv_indptr"] = Tensor(("len_indptr",), "int32")
        inputs["kv_indices"] = Tensor(("num_kv_indices",), "int32")
    else:
        rows, kind = "total_q", "gqa_ragged"
        window, causal = max(of.window for of in views), all(of.causal for of in views)
        queries = [of.queries for of in views]
        axes = {"total_q": sum(queries), "total_kv": sum(cells), "len_indptr": len(views) + 1}
        constraints = ("total_q == qo_indptr[-1].item()", "total_kv == kv_indptr[-1].item()")
        integers = {"qo_indptr": np.cumsum([0, *queries]).astype(np.int32)} | integers
        name = f"gqa_ragged_prefill{'_causal' * causal}_h{heads}_kv{kv_heads}_d{dims}"
        name += f"_w{window}" * bool(window) + suffix
        about = "Prefill of several requests, whose keys follow each other."
        source = _source(references.PREFILL, sinks, CAP=cap, CAUSAL=causal, WINDOW=window)
        inputs = {
            "q": Tensor(("total_q", "num_qo_heads", "head_dim")),
            "k": Tensor(("total_kv", "num_kv_heads", "head_dim"), dtype),
            "v": Tensor(("total_kv", "num_kv_heads", values), dtype),
            "qo_indptr": Tensor(("len_indptr",), "int32"),
            "kv_indptr": Tensor(("len_indptr",), "int32"),
        }
    inputs["sm_scale"] = Tensor(None)
    if sinks:
        inputs["sinks"] = Tensor(("num_qo_heads",))
    outputs = {
        "output": Tensor((rows, "num_qo_heads", values)),
        "lse": Tensor((rows, "num_qo_heads"), about="log-sum-exp to the base of two"),
    }
    tags = type_tags("cache", g.type(k))
    definition = Definition(
        name, kind, about, fixed, tuple(axes), inputs, outputs, source, dtype, tags, constraints
    )
    return Case(definition, axes, integers, {"sm_scale": float(found["scale"])})


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
        # requests share a cache, one behind the other as long as there is room
        at = at + end - low if at + end - low < of.n_kv else 0
    fits = all(view.cells[-1] < of.n_kv * of.streams for view in views if view.cells)
    return (views, True) if fits else (bound, False)


def cells_of(views: Sequence[View]) -> Int32:
    """The cells of all requests, one request behind the other."""
    return np.concatenate([np.asarray(of.cells, np.int32) for of in views])


def views_of_mask(visible: NDArray[np.bool_]) -> list[View]:
    """What each row of a mask shows, (queries, cells): prefills where each row sees what the
    previous one saw and its own cell, with or without a window; otherwise rows of their own."""
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
    """Whether a row sees the cells of the previous row, perhaps without the first, and one more
    behind them; or the same cells."""
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


def _is_latent(g: Tensors, use: Use) -> bool:
    """Whether values are a part of the keys, as in multi-head latent attention."""
    k, v = use.reads["k"], use.reads["v"]
    return g.ne(k)[2] == 1 and g.ne(v)[0] < g.ne(k)[0] and g.viewed(k) == g.viewed(v)


def _source(source: str, sinks: bool, **values: float) -> str:
    """The reference, with or without sinks: scores without a value."""
    fields = {
        "sinks": ", sinks" * sinks,
        "with_sinks": "column = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)\n"
        "    scores = torch.cat((scores, column), dim=-1)\n    " * sinks,
        "without_sinks": "[..., :-1]" * sinks,
    }
    return with_values((references.SCORES + source).format(**fields), **values)


# --- all ---

_Matcher = Callable[[Tensors, int], Use | None]
_MATCHERS: dict[str, tuple[_Matcher, int]] = {
    "MUL_MAT": (gemm, 2),
    "MUL_MAT_ID": (experts, 3),
    "RMS_NORM": (norm, 1),
    "NORM": (norm, 1),
    "GET_ROWS": (rows, 2),
    "ROPE": (rope, 2),
    "GLU": (activation, 1),
    "UNARY": (activation, 1),
    "SOFT_MAX": (softmax, 1),
    "ARGSORT": (topk, 1),
    "TOP_K": (topk, 1),
    "FLASH_ATTN_EXT": (attention, 3),
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV"), (elementwise, 2)),
}
"""by op: what describes a node, and the least number of sources that it has"""


def uses_of(g: Tensors) -> list[Use]:
    """The uses of definitions, in the order of their first nodes. A node belongs to one use at
    most; nodes in none have no definition."""
    found: dict[int, Use] = {}
    # a norm takes the sum before it and the product behind it
    norms = [i for i, op in enumerate(g.nodes.op) if op in ("RMS_NORM", "NORM")]
    for node in [*norms, *range(len(g.nodes.op))]:
        matcher, least = _MATCHERS.get(g.nodes.op[node], (None, 0))
        if node in found or matcher is None or not g.nodes.exec[node]:
            continue
        if len(g.nodes.src[node]) < least:
            continue
        with suppress(ArithmeticError, ValueError):  # impossible sizes and parameters
            use = matcher(g, node)
            if use is not None:
                found.update(dict.fromkeys(use.nodes, use))
    return sorted(dict.fromkeys(found.values()), key=lambda use: use.nodes[0])
