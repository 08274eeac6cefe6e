"""The definitions of ops whose sizes the graph determines: all but attention.

Each function takes a node and returns its use, or None if no definition describes it.
"""

from __future__ import annotations

from math import prod

from llamacpp_instr.converters.exports.flashinfer import references
from llamacpp_instr.converters.exports.flashinfer.definition import Definition, Tensor
from llamacpp_instr.converters.exports.flashinfer.references import FUNCTIONS, with_values
from llamacpp_instr.converters.exports.flashinfer.use import (
    GraphNodes,
    Indices,
    Use,
    dtype_of,
    type_tags,
)
from llamacpp_instr.log.graph.ops import yarn

_SIGNS = {"ADD": "+", "SUB": "-", "MUL": "*", "DIV": "/"}
_GATES = {
    "SWIGLU": "SILU",
    "GEGLU": "GELU",
    "REGLU": "RELU",
    "GEGLU_ERF": "GELU_ERF",
    "GEGLU_QUICK": "GELU_QUICK",
}


def gemm(g: GraphNodes, node: int) -> Use | None:
    """A product with a weight; a weight of several matrices is multiplied batch by batch."""
    a, b = g.nodes.src[node][1], g.nodes.src[node][0]
    if not g.is_weight(b):
        return None
    k, n, batch, others = g.ne(b)
    stored = g.type(b)
    weight = dtype_of(stored)
    tags = type_tags("weights", stored)
    batched = not batch == others == 1
    if batched and (others != 1 or g.ne(a)[2:] != (batch, 1)):
        return None
    first = ("batch",) if batched else ()
    definition = Definition(
        f"batched_gemm_b{batch}_n{n}_k{k}" if batched else f"gemm_n{n}_k{k}", "gemm",
        "C = A @ B.T with a weight of the model as B; activations are float32.",
        dict.fromkeys(first, batch) | {"N": n, "K": k}, ("M",),
        {"A": Tensor((*first, "M", "K")), "B": Tensor((*first, "N", "K"), weight)},
        {"C": Tensor((*first, "M", "N"))},
        with_values(references.BATCHED if batched else references.GEMM), weight, tags,
    )  # fmt: skip
    axes = {"M": g.ne(a)[1] if batched else g.rows(a)}
    return Use(definition, axes, (node,), {"A": a, "B": b})


def experts(g: GraphNodes, node: int) -> Use | None:
    """A product of each token with the experts that were chosen for it."""
    weights, x, ids = g.nodes.src[node][:3]
    if not g.is_weight(weights):
        return None
    k, n, n_experts, _ = g.ne(weights)
    slots, tokens = g.ne(ids)[:2]
    own = g.ne(x)[1]
    dtype = dtype_of(g.type(weights))
    definition = Definition(
        f"moe_gemm_e{n_experts}_t{slots}_n{n}_k{k}",
        "moe",
        "Each token times the matrices of its experts; one product of a mixture of experts.",
        {"N": n, "K": k, "num_experts": n_experts, "top_k": slots, "num_inputs": own},
        ("num_tokens",),
        {
            "hidden_states": Tensor(("num_tokens", "num_inputs", "K")),
            "weights": Tensor(("num_experts", "N", "K"), dtype),
            "expert_ids": Tensor(("num_tokens", "top_k"), "int32"),
        },
        {"output": Tensor(("num_tokens", "top_k", "N"))},
        with_values(references.EXPERTS),
        f"in{own}_{dtype}",
        type_tags("weights", g.type(weights)),
    )
    reads = {"hidden_states": x, "weights": weights, "expert_ids": ids}
    return Use(
        definition, {"num_tokens": tokens}, (node,), reads, {"expert_ids": Indices(n_experts)}
    )


def norm(g: GraphNodes, node: int) -> Use | None:
    """RMS_NORM with the product and the sum around it, or NORM alone. `node` is the norm."""
    (x,) = g.nodes.src[node]
    width, op = g.ne(node)[0], g.op(node)
    eps = float(g.params(node)["eps"])
    axes, fixed = {"batch_size": g.rows(node)}, {"hidden_size": width}
    states = Tensor(("batch_size", "hidden_size"))
    inputs, reads, nodes = {"hidden_states": states}, {"hidden_states": x}, [node]
    name, source = f"rmsnorm_h{width}", references.RMSNORM_ALONE
    about = f"RMSNorm; epsilon is {eps:.6g}."
    if op == "NORM":
        name, source = f"layernorm_h{width}", references.LAYERNORM
        about = f"Layer norm without weight and bias; epsilon is {eps:.6g}."
    else:
        scaled, weight = _scaled(g, node)
        if scaled is None:
            name += "_unscaled"
        else:
            nodes.append(scaled)
            source = references.RMSNORM
            if g.op(x) == "ADD" and _is_residual(g, x):
                a, b = g.nodes.src[x]
                inputs |= {"residual": states}
                reads = {"hidden_states": b, "residual": a}
                nodes.insert(0, x)
                name, source = f"fused_add_{name}", references.ADD_RMSNORM
                about = f"RMSNorm of a sum; epsilon is {eps:.6g}. The sum is kept, too."
            inputs |= {"weight": Tensor(("hidden_size",))}
            reads |= {"weight": weight}
    definition = Definition(
        name, "rmsnorm" if op == "RMS_NORM" else "layernorm", about, fixed, ("batch_size",), inputs,
        {"output": states}, with_values(source, EPS=eps), f"eps{eps:.6g}",
    )  # fmt: skip
    return Use(definition, axes, tuple(nodes), reads)


def _scaled(g: GraphNodes, norm_: int) -> tuple[int | None, int]:
    """The product that alone reads a norm, and its weight."""
    after = norm_ + 1
    if after < len(g.nodes.op) and g.op(after) == "MUL" and g.readers[norm_] == 1:
        a, b = g.nodes.src[after]
        weight = b if a == norm_ else a
        if norm_ in (a, b) and g.is_weight(weight) and g.rows(weight) == 1:
            return after, weight
    return None, 0


def _is_residual(g: GraphNodes, node: int) -> bool:
    a, b = g.nodes.src[node]
    return g.ne(a) == g.ne(b) and not g.is_weight(a) and not g.is_weight(b)


def rows(g: GraphNodes, node: int) -> Use | None:
    """The rows of a table by their numbers: an embedding, or a choice of tokens."""
    table, ids = g.nodes.src[node][:2]
    width, n, *others = g.ne(table)
    if prod(others) != 1 or g.type(ids) != "i32" or g.type(table) in ("i32", "i64"):
        return None
    given = "indices", Tensor(("num_tokens",), "int32")
    stored = g.type(table)
    axes, reads = {"num_tokens": g.rows(node)}, {"indices": ids, "weight": table}
    fixed, variable = {"embedding_dim": width}, ["num_tokens"]
    if g.is_weight(table):
        name, about = f"embedding_v{n}_d{width}", "Rows of the embedding."
        fixed["vocab_size"] = n
    else:
        name, about = f"gather_d{width}", "Rows of activations: the tokens whose output is asked."
        variable.append("vocab_size")
        axes["vocab_size"] = n
    definition = Definition(
        name, "embedding", about, fixed, tuple(variable),
        dict([given]) | {"weight": Tensor(("vocab_size", "embedding_dim"), dtype_of(stored))},
        {"output": Tensor(("num_tokens", "embedding_dim"))}, with_values(references.ROWS),
        dtype_of(stored), type_tags("weights", stored),
    )  # fmt: skip
    return Use(definition, axes, (node,), reads, {"indices": Indices(n)})


def rope(g: GraphNodes, node: int) -> Use | None:
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
    inputs = {
        "x": Tensor(("num_tokens", "num_heads", "head_dim")),
        "positions": Tensor(("num_tokens",), "int32"),
    }
    fixed = {"num_heads": heads, "head_dim": width}
    reads = {"x": x, "positions": positions}
    if factors:
        fixed["num_pairs"] = n_dims // 2
        inputs["factors"] = Tensor(("num_pairs",))
        reads["factors"] = factors[0]
    definition = Definition(
        f"rope_h{heads}_d{width}", "rope",
        f"Rotary positions, base {base:.6g}, of {n_dims} of {width} numbers of a head.",
        fixed, ("num_tokens",), inputs, {"output": inputs["x"]},
        with_values(source, **values, RAMP=kept.tolist(), NEOX=mode == "NEOX"),
        f"{mode.lower()}_w{n_dims}_b{base:.6g}_s{scale:.6g}" + "_factors" * bool(factors),
    )  # fmt: skip
    return Use(definition, {"num_tokens": tokens}, (node,), reads, {"positions": Indices(0)})


def activation(g: GraphNodes, node: int) -> Use | None:
    """A function of each element, or of a gate that is multiplied with another half."""
    sources, kind = g.nodes.src[node], str(g.params(node)["kind"])
    width = g.ne(node)[0]
    vector = Tensor(("batch_size", "hidden_size"))
    gated = g.op(node) == "GLU"
    function = _GATES.get(kind, "") if gated else kind
    # two halves of one tensor are not described
    if function not in FUNCTIONS or (gated and len(sources) != 2):
        return None
    short = function.lower()
    names = ("gate", "up") if gated else ("x",)
    source = references.GATED if gated else references.UNARY
    definition = Definition(
        f"{short}_and_mul_h{width}" if gated else f"{short}_h{width}", "activation",
        f"{function}, times the other input." if gated else f"{function} of each element.",
        {"hidden_size": width}, ("batch_size",), dict.fromkeys(names, vector),
        {"output": vector}, with_values(source.format(function=FUNCTIONS[function])),
    )  # fmt: skip
    return Use(
        definition, {"batch_size": g.rows(node)}, (node,), dict(zip(names, sources, strict=True))
    )


def softmax(g: GraphNodes, node: int) -> Use | None:
    """Of rows without a mask, as those of a router."""
    (x, *masks), scale = g.nodes.src[node], float(g.params(node)["scale"])
    if masks:
        return None
    width = g.ne(node)[0]
    vector = Tensor(("batch_size", "hidden_size"))
    definition = Definition(
        f"softmax_d{width}", "softmax", "Softmax of rows.", {"hidden_size": width}, ("batch_size",),
        {"x": vector}, {"output": vector}, with_values(references.SOFTMAX, SCALE=scale),
        f"scale{scale:.6g}",
    )  # fmt: skip
    return Use(definition, {"batch_size": g.rows(node)}, (node,), {"x": x})


def topk(g: GraphNodes, node: int) -> Use | None:
    """The indices of the largest of each row. ARGSORT sorts all, and a view takes the first."""
    (x,), width = g.nodes.src[node], g.ne(g.nodes.src[node][0])[0]
    if g.op(node) == "ARGSORT":
        views = [i for i, of in enumerate(g.nodes.src) if node in of and g.op(i) == "VIEW"]
        if g.params(node)["order"] != "DESC" or len(views) != 1 or g.readers[node] != 1:
            return None
        k = g.ne(views[0])[0]
    else:
        k = g.ne(node)[0]
    definition = Definition(
        f"topk_d{width}_k{k}", "topk", "The indices of the largest of each row.",
        {"hidden_size": width, "k": k}, ("batch_size",),
        {"x": Tensor(("batch_size", "hidden_size"))},
        {"indices": Tensor(("batch_size", "k"), "int32")}, with_values(references.TOPK, K=k),
    )  # fmt: skip
    return Use(definition, {"batch_size": g.rows(x)}, (node,), {"x": x})


def elementwise(g: GraphNodes, node: int) -> Use | None:
    """A sum or a product of two tensors of one shape, or of rows with one row."""
    a, b = g.nodes.src[node][:2]
    op, width = g.op(node), g.ne(node)[0]
    vector = Tensor(("batch_size", "hidden_size"))
    if g.ne(a) == g.ne(b):
        other, name = vector, f"{op.lower()}_h{width}"
    elif g.ne(b) == (width, 1, 1, 1):
        other, name = Tensor(("hidden_size",)), f"{op.lower()}_row_h{width}"
    else:
        return None
    definition = Definition(
        name, "elementwise", f"a {_SIGNS[op]} b", {"hidden_size": width}, ("batch_size",),
        {"a": vector, "b": other}, {"output": vector},
        with_values(references.ELEMENTWISE.format(sign=_SIGNS[op])),
    )  # fmt: skip
    return Use(definition, {"batch_size": g.rows(node)}, (node,), {"a": a, "b": b})
