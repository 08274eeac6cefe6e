"""The slices of a plan against the columns of its graph, in a recorded log."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from llamacpp_instr.graph.timeline import PlanTimeline, plan_timeline
from llamacpp_instr.log.session import load_session
from llamacpp_instr.schema import Graph, Nodes, Plan
from tests.graph.test_copies import graph_of

SESSION = load_session(Path(__file__).parent.parent / "fixtures" / "demo-verbose.log")
PLANS = list(SESSION.plans.values())
WHOLE = ("MUL_MAT", "ADD", "GLU", "ROPE", "RMS_NORM", "MUL")
"""ops that read all of their sources and write all of their result"""


def made(plan: Plan) -> tuple[Graph, Nodes, PlanTimeline, list[list[int]]]:
    """The timeline of a plan, and the nodes of each kernel."""
    graph = SESSION.graphs[plan.graph]
    assert graph.nodes is not None
    counts = plan.n or [1] * len(plan.node)
    inside = [[*range(node, node + n)] for node, n in zip(plan.node, counts, strict=True)]
    return graph, graph.nodes, plan_timeline(graph, plan), inside


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"plan {plan.plan}")
def test_what_an_op_reads_and_writes_is_in_its_arguments(plan: Plan) -> None:
    graph, nodes, timeline, kernels = made(plan)
    seen = set()
    for op, inside in zip(timeline.ops, kernels, strict=True):
        assert op.name == "+".join(nodes.op[node] for node in inside)
        assert op.args["tensor"] == nodes.name[inside[-1]]
        assert op.args["layer"] == op.layer == nodes.layer[inside[0]]
        read = [s for node in inside for s in nodes.src[node] if s not in inside]
        for i, source in enumerate(read):
            name = graph.leafs[-1 - source].name if source < 0 else nodes.name[source]
            assert str(op.args[f"source_{i}"]).startswith(f"{name} ")
        assert f"source_{len(read)}" not in op.args
        if not set(op.name.split("+")) <= set(WHOLE):
            continue
        seen.add(op.name)
        sizes = [graph.leafs[-1 - s].bytes if s < 0 else nodes.bytes[s] for s in read]
        assert op.args["bytes_read"] == sum(sizes)
        assert op.args["bytes_written"] == nodes.bytes[inside[-1]]
        assert op.args["bytes"] == op.bytes == sum(sizes) + nodes.bytes[inside[-1]]
        weights = [graph.leafs[-1 - s] for s in read if s < 0 and graph.leafs[-1 - s].tensor >= 0]
        if weights and op.name != "ROPE":
            inside_name = weights[0].name.removeprefix(f"blk.{op.layer}.")
            assert op.title == f"{op.name} {inside_name.removesuffix('.weight')}"
        assert op.args.get("weight") == (weights[0].name if weights else None)
        assert op.args.get("weight_type") == (weights[0].type if weights else None)
        assert ("fused_with" in op.args) == (len(inside) > 1)
    assert {"MUL_MAT", "ADD", "RMS_NORM+MUL"} <= seen


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"plan {plan.plan}")
def test_runs_are_the_layers_and_blocks_one_after_the_other(plan: Plan) -> None:
    _, _, timeline, _ = made(plan)
    layers = [op.layer for op in timeline.ops]
    assert [(run.layer, run.last - run.first + 1) for run in timeline.layers] == [
        (layer, len([*of])) for layer, of in groupby(layers)
    ]
    blocks = [(op.layer, op.block) for op in timeline.ops]
    assert [(run.layer, run.name) for run in timeline.blocks] == [key for key, _ in groupby(blocks)]
    for runs in (timeline.layers, timeline.blocks):
        assert [run.first for run in runs] == [0, *(run.last + 1 for run in runs[:-1])]
        assert runs[-1].last == len(timeline.ops) - 1
    assert {run.name for run in timeline.layers} == {
        f"layer {layer}" if layer >= 0 else "no layer" for layer in layers
    }


def test_a_block_ends_with_its_layer() -> None:
    graph = graph_of(["inp"], ["ffn_up-0", "ffn_up-1"], [[-1], [0]])
    assert graph.nodes is not None
    graph.nodes.layer[1] = 1
    timeline = plan_timeline(graph, Plan(t=0, plan=0, graph=0, node=[0, 1]))
    assert [(run.name, run.first, run.last) for run in timeline.blocks] == [
        ("feed-forward", 0, 0), ("feed-forward", 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"plan {plan.plan}")
def test_edges_lead_from_the_kernel_that_computed_to_each_that_reads(plan: Plan) -> None:
    _, nodes, timeline, kernels = made(plan)
    kernel_of = {node: kernel for kernel, inside in enumerate(kernels) for node in inside}
    wanted = set()
    for kernel, inside in enumerate(kernels):
        for source in (s for node in inside for s in nodes.src[node]):
            while source >= 0 and not nodes.exec[source]:
                source = nodes.src[source][0]
            if source >= 0 and kernel_of[source] != kernel:
                wanted.add((kernel_of[source], kernel))
    assert set(timeline.edges) == wanted
    assert len(timeline.edges) == len(wanted)
