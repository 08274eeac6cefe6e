"""A graph of several nodes as ONNX: views, caches that are written, names, weights beside it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.exports.onnx.export import (
    ALIGNMENT,
    export_graph,
    weight_bytes,
    with_external_weights,
    with_weights_as_inputs,
)
from llamacpp_instr.converters.exports.tensors import Tensors
from llamacpp_instr.log.schema import Graph, Leaf, Nodes
from tests.exports.test_onnx_ops import RNG, Array, close, some, words

Node = tuple[str, str, str, list[int], list[int], list[int], list[int]]
"""name, op, type, shape and strides in ggml's order, sources and parameters"""
SIZES = {"f32": 4, "f16": 2, "i32": 4, "i64": 8}


def graph_of(leafs: list[Leaf], nodes: list[Node]) -> Graph:
    names, ops, types, ne, nb, src, params = map(list, zip(*nodes, strict=True))
    columns: dict[str, Any] = {
        "name": names, "op": ops, "type": types, "ne": ne, "nb": nb, "src": src, "params": params,
    }  # fmt: skip
    n = len(nodes)
    whole = Nodes(layer=[0] * n, bytes=[64] * n, buffer=[0] * n, exec=[1] * n, **columns)
    return Graph(
        t=0, graph=0, ctx=0, uid=0, source="decode", why="first", n_nodes=n, n_exec=n, splits=[],
        leafs=leafs, nodes=whole,
    )  # fmt: skip


def dense(type_: str, *ne: int) -> list[int]:
    """The strides of a contiguous tensor."""
    return [SIZES[type_] * int(np.prod(ne[:i], dtype=int)) for i in range(4)]


def node(name: str, op: str, ne: list[int], src: list[int], type_: str = "f32",
         nb: list[int] | None = None, params: list[int] | None = None) -> Node:  # fmt: skip
    return name, op, type_, ne, nb or dense(type_, *ne), src, params or []


def leaf(name: str, ne: list[int], type_: str = "f32", weight: int = -1) -> Leaf:
    n_bytes = int(np.prod(ne)) * SIZES.get(type_, 1)
    return Leaf(name=name, type=type_, ne=ne, bytes=n_bytes, tensor=weight)


def return_every_node(model: onnx.ModelProto, names: dict[int, str]) -> None:
    """Adds the values of all nodes to the model's outputs."""
    wanted = {*names.values()} - {of.name for of in model.graph.output}
    known = onnx.shape_inference.infer_shapes(model).graph.value_info
    model.graph.output.extend(of for of in known if of.name in wanted)


def run(graph: Graph, values: dict[str, Array], every_node: bool = False) -> dict[str, Array]:
    """All outputs by their names; weights are inputs."""
    exported = export_graph(graph)
    model = with_weights_as_inputs(exported, graph)
    if every_node:
        return_every_node(model, exported.names)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds = {of.name: values[of.name].reshape(of.shape) for of in session.get_inputs()}
    names = [of.name for of in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def test_views_are_read_where_their_elements_lie() -> None:
    """A part of rows, a transposed matrix, and every second column, of the result of another op."""
    x = some(1, 1, 4, 6)
    offset = 4 * (6 + 2)
    graph = graph_of(
        [leaf("x", [6, 4])],
        [
            node("twice", "ADD", [6, 4], [-1, -1]),
            node("part", "VIEW", [3, 2], [0], nb=[4, 24, 48, 48], params=[offset]),
            node("of part", "SCALE", [3, 2], [1], params=words(2.0)),
            node("turned", "PERMUTE", [4, 6], [0], nb=[24, 4, 96, 96]),
            node("of turned", "SCALE", [4, 6], [3], params=words(3.0)),
            node("second", "VIEW", [3, 4], [0], nb=[8, 24, 96, 96]),
            node("of second", "SCALE", [3, 4], [5], params=words(4.0)),
            node("row", "RESHAPE", [24], [0], nb=[4, 96, 96, 96]),
            node("sum", "SUM", [1], [7]),
        ],
    )
    found = run(graph, {"x": x})
    twice = 2 * x[0, 0]
    assert set(found) == {"of part", "of turned", "of second", "sum"}
    close(found["of part"], 2 * twice[1:3, 2:5])
    close(found["of turned"], 3 * twice.T)
    close(found["of second"], 4 * twice[:, ::2])
    close(found["sum"], twice.sum(keepdims=True))
    # a node that others read is an output if it is asked for
    close(run(graph, {"x": x}, True)["twice"], twice)


def test_a_view_may_lie_beyond_4_gib() -> None:
    """Its offset has two words."""
    graph = graph_of(
        [leaf("x", [1 << 31])],
        [node("part", "VIEW", [2], [-1], nb=[4] * 4, params=[-8, 0])],
    )
    assert graph.nodes is not None
    for low, high, at in ((-8, 0, (1 << 32) - 8), (4, 1, (1 << 32) + 4), (12, 0, 12)):
        graph.nodes.params[0] = [low, high] if high else [low]
        place = Tensors(graph).place(0)
        assert (place.base, place.offset, place.shape) == (-1, at // 4, (1, 1, 1, 2))


def test_a_cache_is_read_as_it_is_after_the_last_write() -> None:
    cache, x = some(1, 1, 4, 6).astype(np.float16), some(1, 1, 2, 6)
    rows = np.array([3, 1], np.int64)
    graph = graph_of(
        [leaf("cache", [6, 4], "f16"), leaf("x", [6, 2]), leaf("rows", [2], "i64")],
        [
            node("before", "GET_ROWS", [6, 2], [-1, -3]),
            node("set", "SET_ROWS", [6, 4], [-2, -3, -1], "f16"),
            node("after", "GET_ROWS", [6, 2], [-1, -3]),
            node("place", "VIEW", [3, 2], [-1], "f16", nb=[2, 12, 24, 24], params=[12 + 4]),
            node("some", "VIEW", [3, 2], [-2], nb=[4, 24, 48, 48]),
            node("copy", "CPY", [3, 2], [4, 3], "f16", nb=[2, 12, 24, 24]),
            node("last", "CONT", [6, 4], [-1]),
        ],
    )
    found = run(graph, {"cache": cache, "x": x, "rows": rows})
    expected = cache[0, 0].copy()
    close(found["before"], expected[rows].astype(np.float32))
    expected[rows] = x[0, 0].astype(np.float16)
    close(found["after"], expected[rows].astype(np.float32))
    expected[1:3, 2:5] = x[0, 0, :, :3].astype(np.float16)
    assert (found["cache after"][0, 0] == expected).all()
    assert found["cache after"].dtype == np.float16
    close(found["last"], expected.astype(np.float32))
    assert set(found) == {"before", "after", "last", "cache after"}
    exported = export_graph(graph)
    assert exported.inputs == {-1: "cache", -2: "x", -3: "rows"}


def test_what_works_in_place_changes_what_it_reads() -> None:
    x = some(1, 1, 1, 4)
    graph = graph_of(
        [leaf("x", [4])],
        [
            node("a", "SCALE", [4], [-1], params=words(2.0)),
            node("a (view)", "SCALE", [4], [0], params=words(5.0)),
            node("b", "SCALE", [4], [0], params=words(1.0)),
        ],
    )
    found = run(graph, {"x": x})
    close(found["b"], 10 * x)


def test_equal_names_get_numbers_and_operators_say_where_they_belong() -> None:
    graph = graph_of(
        [leaf("x", [4]), leaf("norm", [4], weight=0)],
        [
            node("h", "RMS_NORM", [4], [-1], params=words(1e-5)),
            node("h", "MUL", [4], [0, -2]),
            node("h", "SQR", [4], [1]),
            node("other", "SQR", [4], [1]),
        ],
    )
    assert graph.nodes is not None
    graph.nodes.layer = [3, 3, -1, -1]
    exported = export_graph(graph)
    assert exported.names == {0: "h", 1: "h#2", 2: "h#3", 3: "h#3"}
    operators = list(exported.model.graph.node)
    assert [of.op_type for of in operators if of.op_type == "Mul"] == ["Mul", "Mul"], "once"
    meta = {of.output[0]: {p.key: p.value for p in of.metadata_props} for of in operators}
    assert meta["h"] == {"op": "RMS_NORM", "layer": "3", "block": "norm"}
    assert meta["h#3"]["layer"] == "-1"
    names = [name for of in operators for name in of.output]
    assert len(set(names)) == len(names)
    assert exported.weights == {-2: "norm"}
    # the first with RMSNormalization, RotaryEmbedding and Attention
    assert [of.version for of in exported.model.opset_import if not of.domain] == [23]


def test_an_input_that_nothing_computes_is_still_an_output() -> None:
    graph = graph_of([leaf("x", [4])], [node("same", "CONT", [2, 2], [-1])])
    x = some(1, 1, 1, 4)
    close(run(graph, {"x": x})["same"], x)


class Given:
    """Weights in pieces."""

    def __init__(self, values: dict[str, Array]) -> None:
        self.values = values

    def check(self, leaf: Leaf) -> None:
        if leaf.name not in self.values:
            raise UsageError(f"no {leaf.name}")

    def pieces(self, leaf: Leaf) -> Iterator[Array]:
        yield from np.array_split(self.values[leaf.name].ravel(), 3)


def test_weights_lie_beside_the_model(tmp_path: Path) -> None:
    half, full = RNG.normal(0, 1, (5, 6)).astype(np.float16), some(7, 32)
    graph = graph_of(
        [
            leaf("x", [6]),
            leaf("half", [6, 5], "f16", 0),
            leaf("full", [32, 7], "q8_0", 1),
            leaf("y", [32]),
        ],
        [node("a", "MUL_MAT", [5], [-2, -1]), node("b", "MUL_MAT", [7], [-3, -4])],
    )
    exported = export_graph(graph)
    assert weight_bytes(exported, graph) == 2 * 30 + 4 * 224
    calls: list[tuple[int, int]] = []
    with (tmp_path / "model.onnx.data").open("wb") as data:
        model = with_external_weights(
            exported, graph, Given({"half": half, "full": full}), "model.onnx.data", data,
            lambda done, total: calls.append((done, total)),
        )  # fmt: skip
    size = (tmp_path / "model.onnx.data").stat().st_size
    places = [{of.key: of.value for of in t.external_data} for t in model.graph.initializer
              if t.external_data]  # fmt: skip
    assert [(int(of["offset"]), int(of["length"])) for of in places] == [(0, 60), (ALIGNMENT, 896)]
    assert size == ALIGNMENT + 896
    assert calls[-1] == (956, 956)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    onnx.save(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    x, y = some(1, 1, 1, 6), some(1, 1, 1, 32)
    a, b = session.run(["a", "b"], {"x": x, "y": y})
    close(a, half.astype(np.float32) @ x.ravel())
    close(b, full @ y.ravel())
    with pytest.raises(UsageError, match="no full"):
        with_external_weights(
            exported, graph, Given({"half": half}), "n", io.BytesIO(), lambda *_: None
        )
