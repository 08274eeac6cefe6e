"""Which RMS_NORM and MUL a CPU computes together, by ggml's rules."""

from __future__ import annotations

from typing import Any

import pytest

from llamacpp_instr.log.graph.kernels import cpu_plan
from llamacpp_instr.log.schema import Graph, Leaf, Nodes


def graph_of(**changes: Any) -> Graph:
    """x, a scaled norm of it, and a sum with x; `changes` are columns."""
    columns: dict[str, Any] = {
        "op": ["SCALE", "RMS_NORM", "MUL", "ADD"], "src": [[-1], [0], [1, -2], [2, 0]],
        "ne": [[4, 2]] * 4, "type": ["f32"] * 4, "exec": [1] * 4,
    }  # fmt: skip
    factor = changes.pop("factor", ("f32", [4]))
    columns |= changes
    n = len(columns["op"])
    nodes = Nodes(
        name=["node"] * n, layer=[0] * n, bytes=[32] * n, buffer=[-1] * n, params=[[]] * n,
        **columns,
    )  # fmt: skip
    leafs = [Leaf(name="x", type="f32", ne=[4, 2], bytes=32),
             Leaf(name="norm", type=factor[0], ne=factor[1], bytes=16, tensor=0)]  # fmt: skip
    return Graph(
        t=5, graph=3, ctx=0, uid=1, source="reserve", why="first", n_nodes=n, n_exec=n, splits=[],
        leafs=leafs, nodes=nodes,
    )  # fmt: skip


def test_a_norm_and_its_factor_are_one_kernel() -> None:
    plan = cpu_plan(graph_of())
    assert (plan.t, plan.graph, plan.node, plan.n) == (5, 3, [0, 1, 3], [1, 2, 1])
    swapped = cpu_plan(graph_of(src=[[-1], [0], [-2, 1], [2, 0]]))
    assert (swapped.node, swapped.n) == ([0, 1, 3], [1, 2, 1])


@pytest.mark.parametrize(
    "changes",
    [
        {"op": ["SCALE", "NORM", "MUL", "ADD"]},
        {"op": ["SCALE", "RMS_NORM", "ADD", "ADD"]},
        # something else reads the norm, or both factors are the norm
        {"src": [[-1], [0], [1, -2], [2, 1]]},
        {"src": [[-1], [0], [1, 1], [2, 0]]},
        # the product is of something else
        {"src": [[-1], [0], [0, -2], [2, 1]]},
        {"ne": [[4, 2], [4, 2], [4, 1], [4, 2]]},
        {"type": ["f16", "f32", "f32", "f32"]},
        {"type": ["f32", "f32", "f16", "f32"]},
        {"factor": ("f16", [4])},
        {"factor": ("f32", [1])},
    ],
)
def test_everything_else_is_a_kernel_of_its_own(changes: dict[str, Any]) -> None:
    plan = cpu_plan(graph_of(**changes))
    assert (plan.node, plan.n) == ([0, 1, 2, 3], None)


def test_what_has_no_kernel_is_left_out() -> None:
    plan = cpu_plan(graph_of(exec=[1, 1, 1, 0]))
    assert (plan.node, plan.n) == ([0, 1], [1, 2])
    plan = cpu_plan(graph_of(exec=[1, 0, 1, 1]))
    assert (plan.node, plan.n) == ([0, 2, 3], None)
    last = graph_of(op=["SCALE", "RMS_NORM"], src=[[-1], [0]], ne=[[4, 2]] * 2, type=["f32"] * 2,
                    exec=[1, 1])  # fmt: skip
    assert cpu_plan(last).node == [0, 1]
