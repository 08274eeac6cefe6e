"""Each op as standard operators computes what ggml's formula says, with numbers that are made up.

`test_onnx.py` compares with llama.cpp itself; this needs neither it nor a model.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.exports.onnx.export import export_graph, with_weights_as_inputs
from llamacpp_instr.log.schema import Graph, Leaf, Nodes

Array = NDArray[Any]
RNG = np.random.default_rng(7)
NAMES = {"float32": "f32", "float16": "f16", "int32": "i32", "int64": "i64"}


def words(*values: float) -> list[int]:
    """Parameters as ggml stores them: floats by their bits."""
    return [
        struct.unpack("<i", struct.pack("<f", v))[0] if isinstance(v, float) else v for v in values
    ]


def some(*shape: int) -> Array:
    """Random numbers, in numpy's order of the dimensions."""
    return RNG.normal(0, 1, shape).astype(np.float32)


def ggml_shape(array: Array) -> list[int]:
    return list(array.shape[::-1])


def graph_of(
    op: str, sources: Sequence[Array], shape: Sequence[int], params: Sequence[int], dtype: str,
    weights: Sequence[int], src: Sequence[int] | None,
) -> Graph:  # fmt: skip
    """One node that reads these leafs; `weights` are the numbers of those that are weights."""
    ne = list(shape[::-1])
    size = np.dtype(dtype).itemsize
    nb = [size * int(np.prod(ne[:i])) for i in range(4)]
    leafs = [
        Leaf(name=f"in {i}", type=NAMES[of.dtype.name], ne=ggml_shape(of), bytes=of.nbytes,
             tensor=i if i in weights else -1)
        for i, of in enumerate(sources)
    ]  # fmt: skip
    nodes = Nodes(
        name=["node"], op=[op], layer=[0], type=[NAMES[dtype]], ne=[ne], bytes=[int(np.prod(ne))],
        src=[list(src) if src is not None else [-1 - i for i in range(len(sources))]], buffer=[0],
        params=[list(params)], exec=[1], nb=[nb],
    )  # fmt: skip
    return Graph(
        t=0, graph=0, ctx=0, uid=0, source="decode", why="first", n_nodes=1, n_exec=1, splits=[],
        leafs=leafs, nodes=nodes,
    )  # fmt: skip


def computed(
    op: str, *sources: Array, shape: Sequence[int], params: Sequence[int] = (),
    dtype: str = "float32", weights: Sequence[int] = (), src: Sequence[int] | None = None,
) -> Array:  # fmt: skip
    """What ONNX Runtime computes for one node."""
    graph = graph_of(op, sources, shape, params, dtype, weights, src)
    exported = export_graph(graph)
    assert exported.missing == {}
    names = {**exported.inputs, **exported.weights}
    model = with_weights_as_inputs(exported, graph)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    shapes = {of.name: of.shape for of in session.get_inputs()}
    feeds = {name: sources[-1 - leaf].reshape(shapes[name]) for leaf, name in names.items()}
    (value,) = session.run(None, feeds)
    return np.asarray(value)


def missing(op: str, *sources: Array, shape: Sequence[int], params: Sequence[int] = ()) -> bool:
    """Whether the op has no equivalent in standard operators and is exported as one of ours."""
    exported = export_graph(graph_of(op, sources, shape, params, "float32", (), None))
    (node,) = (of for of in exported.model.graph.node if of.op_type == op)
    assert (node.domain, exported.missing) == ("ggml", {op: 1})
    return list(node.attribute[0].ints) == (list(params) or [0])


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected.reshape(found.shape), rtol=1e-4, atol=2e-5)


# --- elements ---

X = some(2, 3, 4, 6)


@pytest.mark.parametrize(
    ("op", "of"), [("ADD", np.add), ("SUB", np.subtract), ("MUL", np.multiply), ("DIV", np.divide)]
)
def test_two_tensors_of_which_the_second_is_repeated(op: str, of: Any) -> None:
    for shape in ((2, 3, 4, 6), (1, 1, 1, 6), (1, 3, 1, 1), (2, 1, 2, 3)):
        y = some(*shape)
        whole = np.tile(y, [n // own for n, own in zip(X.shape, shape, strict=True)])
        for weights in ((), (1,)):
            close(computed(op, X, y, shape=X.shape, weights=weights), of(X, whole))
    row = some(6)
    close(computed(op, X, row, shape=X.shape, weights=[1]), of(X, row))


@pytest.mark.parametrize(
    ("op", "params", "formula"),
    [
        ("SCALE", words(1.5, 0.0), lambda x: 1.5 * x),
        ("SCALE", words(1.5, 0.25), lambda x: 1.5 * x + 0.25),
        ("CLAMP", words(-0.5, 0.75), lambda x: np.clip(x, -0.5, 0.75)),
        ("LEAKY_RELU", words(0.125), lambda x: np.where(x > 0, x, 0.125 * x)),
        ("SQR", [], np.square),
        ("SIN", [], np.sin),
        ("COS", [], np.cos),
        ("RMS_NORM", words(1e-5), lambda x: x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)),
        ("NORM", words(1e-5), lambda x: (x - x.mean(-1, keepdims=True))
         / np.sqrt(x.var(-1, keepdims=True) + 1e-5)),
        ("L2_NORM", words(1e-6), lambda x: x / np.sqrt((x**2).sum(-1, keepdims=True))),
        ("L2_NORM", words(100.0), lambda x: x / 100),
        ("CUMSUM", [], lambda x: np.cumsum(x, -1)),
        ("UNARY", [0], np.abs),
        ("UNARY", [1], np.sign),
        ("UNARY", [2], np.negative),
        ("UNARY", [3], lambda x: (x > 0).astype(np.float32)),
        ("UNARY", [4], np.tanh),
        ("UNARY", [5], lambda x: np.where(x > 0, x, np.expm1(x))),
        ("UNARY", [6], lambda x: np.maximum(x, 0)),
        ("UNARY", [7], lambda x: 1 / (1 + np.exp(-x))),
        ("UNARY", [8], lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi)
                                                       * (x + 0.044715 * x**3)))),
        ("UNARY", [9], lambda x: x / (1 + np.exp(-1.702 * x))),
        ("UNARY", [10], lambda x: x / (1 + np.exp(-x))),
        ("UNARY", [11], lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
        ("UNARY", [12], lambda x: np.clip(x / 6 + 0.5, 0, 1)),
        ("UNARY", [13], np.exp),
        ("UNARY", [14], np.expm1),
        ("UNARY", [15], lambda x: np.log1p(np.exp(x))),
        ("UNARY", [18], np.floor),
        ("UNARY", [19], np.ceil),
    ],
)  # fmt: skip
def test_one_tensor(op: str, params: list[int], formula: Any) -> None:
    x = 3 * X
    close(computed(op, x, shape=x.shape, params=params), formula(x.astype(np.float64)))


def test_positive_numbers_and_the_error_function() -> None:
    from math import erf

    x = np.abs(X) + 1
    close(computed("SQRT", x, shape=x.shape), np.sqrt(x))
    close(computed("LOG", x, shape=x.shape), np.log(x))
    of = np.vectorize(lambda v: 0.5 * v * (1 + erf(v / np.sqrt(2))))
    close(computed("UNARY", X, shape=X.shape, params=[16]), of(X))


def test_a_function_that_has_no_operator_stays_one_of_ours() -> None:
    assert missing("UNARY", X, shape=X.shape, params=[17])
    assert missing("POOL_2D", X, shape=X.shape)


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


@pytest.mark.parametrize("swapped", [0, 1])
def test_one_half_gates_the_other(swapped: int) -> None:
    halves = np.split(X, 2, axis=3)
    x, gate = halves[::-1] if swapped else halves
    close(computed("GLU", X, shape=x.shape, params=[2, swapped]), silu(x) * gate)
    close(computed("GLU", X, shape=x.shape, params=[0, swapped]), np.maximum(x, 0) * gate)


def test_one_tensor_gates_another() -> None:
    x, gate = 3 * some(1, 2, 3, 4), 3 * some(1, 2, 3, 4)
    found = computed("GLU", x, gate, shape=x.shape, params=[5])
    close(found, x / (1 + np.exp(-1.702 * x)) * gate)
    limits = [3, 0, *words(1.702, 2.0)]
    found = computed("GLU", x, gate, shape=x.shape, params=limits)
    low = np.minimum(x, 2)
    close(found, low / (1 + np.exp(-1.702 * low)) * (np.clip(gate, -2, 2) + 1))
    found = computed("GLU", x, gate, shape=x.shape, params=[6, 0, 0, *words(1.5)])
    close(found, silu(np.minimum(x, 1.5)) * np.clip(gate, -1.5, 1.5))


# --- rows ---


def test_sums_and_orders_of_rows() -> None:
    rows = (2, 3, 4, 1)
    close(computed("SUM_ROWS", X, shape=rows), X.sum(-1))
    close(computed("MEAN", X, shape=rows), X.mean(-1))
    close(computed("SUM", X, shape=(1, 1, 1, 1)), X.sum(keepdims=True))
    order = {"params": [0], "dtype": "int32"}
    assert (computed("ARGSORT", X, shape=X.shape, **order) == X.argsort(-1)).all()
    order["params"] = [1]
    assert (computed("ARGSORT", X, shape=X.shape, **order) == (-X).argsort(-1)).all()
    best = computed("TOP_K", X, shape=(2, 3, 4, 2), dtype="int32")
    assert (best == (-X).argsort(-1)[..., :2]).all()
    (table,) = X[0, :1]
    found = computed("ARGMAX", table, shape=(1, 1, 1, 4), dtype="int32")
    assert found.ravel().tolist() == table.argmax(-1).tolist()


# --- matrices ---


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((5, 6), (2, 3, 4, 6)),
        ((1, 1, 5, 6), (2, 3, 4, 6)),
        ((2, 3, 5, 6), (2, 3, 4, 6)),
        ((1, 3, 5, 6), (2, 6, 4, 6)),
        ((2, 1, 5, 6), (2, 2, 4, 6)),
    ],
)
def test_a_product_of_rows(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    """A matrix of the first serves several of the second, which follow each other."""
    w, x = some(*first), some(*second)
    w4 = w.reshape((1,) * (4 - w.ndim) + w.shape)
    each = np.repeat(w4, second[0] // w4.shape[0], axis=0)
    each = np.repeat(each, second[1] // w4.shape[1], axis=1)
    expected = x @ each.transpose(0, 1, 3, 2)
    for weights in ((), (0,)):
        close(computed("MUL_MAT", w, x, shape=expected.shape, weights=weights), expected)


def test_a_weight_of_one_row() -> None:
    w, x = some(6), some(1, 2, 4, 6)
    expected = (x @ w)[..., None]
    close(computed("MUL_MAT", w, x, shape=expected.shape, weights=[0]), expected)


@pytest.mark.parametrize("each", [1, 2])
def test_products_with_experts(each: int) -> None:
    """Three tokens, two of four experts each; an input for all of a token's experts or for each."""
    w, x = some(4, 5, 6), some(1, 3, each, 6)
    ids = np.array([[[[0, 3], [2, 1], [3, 3]]]], np.int32)
    expected = np.array(
        [[[w[e] @ x[0, t, i % each] for i, e in enumerate(row)] for t, row in enumerate(ids[0, 0])]]
    )
    for weights in ((), (0,)):
        found = computed("MUL_MAT_ID", w, x, ids, shape=(1, 3, 2, 5), weights=weights)
        close(found, expected)


def test_the_rows_of_chosen_experts_are_added() -> None:
    x, rows = some(1, 3, 2, 6), some(4, 6)
    ids = np.array([[[[0, 3], [2, 1], [3, 3]]]], np.int32)
    close(computed("ADD_ID", x, rows, ids, shape=x.shape, weights=[1]), x + rows[ids[0, 0]])


# --- copies ---


def test_copies_have_the_shape_and_the_type_of_the_result() -> None:
    close(computed("CONT", X, shape=(1, 6, 4, 6)), X)
    whole = np.arange(24, dtype=np.int32).reshape(1, 1, 4, 6)
    assert computed("DUP", whole, shape=whole.shape).dtype == np.float32
    assert (computed("CONT", X * 9, shape=X.shape, dtype="int32") == (X * 9).astype(np.int32)).all()
    half = computed("CONT", X, shape=X.shape, dtype="float16")
    assert half.dtype == np.float16
    assert (half == X.astype(np.float16)).all()
    assert (computed("CONT", half, shape=X.shape) == half.astype(np.float32)).all()


def test_repeated_and_joined() -> None:
    small = some(1, 3, 1, 6)
    close(computed("REPEAT", small, shape=(2, 3, 4, 6)), np.tile(small, (2, 1, 4, 1)))
    close(computed("REPEAT", small, shape=(1, 6, 1, 12)), np.tile(small, (1, 2, 1, 2)))
    for dim in range(4):
        shape = list(X.shape)
        shape[3 - dim] = 2
        other = some(*shape)
        joined = np.concatenate([X, other], axis=3 - dim)
        close(computed("CONCAT", X, other, shape=joined.shape, params=[dim]), joined)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_by_their_numbers(dtype: str) -> None:
    table, ids = some(5, 6).astype(dtype), np.array([4, 0, 4], np.int32)
    for weights in ((), (0,)):
        found = computed("GET_ROWS", table, ids, shape=(1, 1, 3, 6), weights=weights)
        close(found, table[ids].astype(np.float32))
    # of several matrices, each with numbers of its own
    many, its = some(2, 3, 5, 6).astype(dtype), RNG.integers(0, 5, (1, 2, 3, 4)).astype(np.int32)
    expected = np.take_along_axis(many, its[0][..., None], axis=2)
    close(computed("GET_ROWS", many, its, shape=(2, 3, 4, 6)), expected.astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_rows_are_set(dtype: str, kind: str) -> None:
    data, to = some(2, 1, 2, 6), some(2, 1, 5, 6).astype(dtype)
    ids = np.array([[[[4, 1]], [[0, 3]]]], kind)
    expected = to.copy()
    for i in range(2):
        expected[i, 0, ids[0, i, 0]] = data[i, 0].astype(dtype)
    found = computed("SET_ROWS", data, ids, to, shape=to.shape, dtype=dtype)
    assert found.dtype == dtype
    assert (found == expected).all()


def test_values_from_nothing() -> None:
    found = computed("ARANGE", shape=(1, 1, 1, 4), params=words(2.0, 4.0, 0.5))
    assert found.ravel().tolist() == [2, 2.5, 3, 3.5]
    assert (
        computed("FILL", X, shape=(1, 1, 2, 3), params=words(1.5)) == np.full((2, 3), 1.5)
    ).all()


def test_what_ggml_cannot_have_made_is_named() -> None:
    graph = graph_of("MUL_MAT", [X], X.shape, [], "float32", (), None)
    with pytest.raises(
        UsageError, match="node 0 of graph 0, MUL_MAT 'node', has sources or shapes"
    ):
        export_graph(graph)
    huge = graph_of("FILL", [X], (1, 1, 1 << 14, (1 << 12) + 1), words(1.0), "float32", (), None)
    with pytest.raises(UsageError, match="FILL 'node', has sources or shapes"):
        export_graph(huge)
    assert graph.nodes is not None
    graph.nodes.nb = None
    with pytest.raises(UsageError, match="--level verbose"):
        export_graph(graph)
