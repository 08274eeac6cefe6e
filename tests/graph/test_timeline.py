"""The slices of a plan against the columns of its graph, in a recorded log."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from llamacpp_instr.log.graph.timeline import (
    Lanes,
    PlanTimeline,
    Selection,
    layer_name,
    plan_timeline,
    remember,
    thread_spans,
)
from llamacpp_instr.log.schema import Graph, Nodes, Plan, Split
from llamacpp_instr.log.session import load_session
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


# --- by hand ---


def timeline_of(graph: Graph, ops: list[str]) -> PlanTimeline:
    graph.whole.op[:] = ops
    return plan_timeline(graph, Plan(t=0, plan=0, graph=0, node=[*range(len(ops))]))


@pytest.mark.parametrize(
    ("selection", "gaps", "spans"),
    [
        (Selection(), False, [(0, 3, 0), (1, 4, 1), (2, 5, 2)]),
        (Selection(), True, [(0, 3, 0), (3, 1, None), (1, 4, 1), (4, 2, None), (2, 5, 2),
                             (5, 6, None)]),
        (Selection(ops={"MUL"}), True, [(3, 1, None), (1, 4, 1)]),
        (Selection(ops={"SCALE", "ROPE"}), True, [(4, 2, None), (2, 5, 2), (5, 6, None)]),
        (Selection(layers=(1, 1)), False, [(1, 4, 1)]),
        (Selection(layers=(0, 1)), False, [(0, 3, 0), (1, 4, 1)]),
        (Selection(layers=(1, 2)), False, [(1, 4, 1), (2, 5, 2)]),
    ],
)  # fmt: skip
def test_a_thread_computes_and_waits_after_each_kernel(
    selection: Selection, gaps: bool, spans: list[tuple[int, int, int | None]]
) -> None:
    """Kernels begin at 0 to 2 and end at 3 to 5, and 6 is when all threads are done."""
    graph = graph_of(["inp"], ["a", "b", "c"], [[-1], [0], [1]])
    graph.whole.layer[:] = [0, 1, 2]
    timeline = timeline_of(graph, ["ADD", "MUL", "SCALE"])
    assert list(thread_spans(timeline, selection, gaps)) == spans


def test_a_selection_has_both_its_bounds() -> None:
    chosen = Selection(steps=(2, 4), layers=(1, 2))
    assert [step for step in range(7) if chosen.has_step(step)] == [2, 3, 4]
    assert [layer for layer in range(-1, 5) if chosen.has_layer(layer)] == [1, 2]
    assert Selection().has_step(0)
    assert Selection().has_layer(-1)


def test_only_the_latest_values_are_remembered() -> None:
    known: dict[str, int] = {}
    for value, key in enumerate("abc"):
        remember(known, key, value, 2)
    assert known == {"b": 1, "c": 2}


@pytest.mark.parametrize(("late", "lane"), [(15, 15), (16, 17)])
def test_a_lane_is_sought_among_the_first_sixteen_free_ones(late: int, lane: int) -> None:
    """All but one of 17 are free only later."""
    lanes = Lanes()
    for key in range(17):
        lanes.begin(key, 0)
    for key in range(17):
        lanes.end(key, 5 if key == late else 100)
    assert lanes.begin(17, 50) == lane
    assert lanes.open == {17: (lane, 50)}


def test_a_lane_is_free_from_the_end_of_its_span_and_not_before_its_start() -> None:
    lanes = Lanes()
    lanes.begin(0, 10)
    assert lanes.end(0, 4) == (0, 10)
    assert lanes.begin(1, 9) == 1
    assert lanes.begin(2, 10) == 0


@pytest.mark.parametrize(("number", "name"), [(-1, None), (0, "CPU"), (1, "CPU_Mapped"), (2, None)])
def test_the_buffer_and_the_backend_of_an_op(number: int, name: str | None) -> None:
    graph = graph_of(["inp"], ["a", "b"], [[-1], [0]])
    graph.buffers, graph.whole.buffer[0] = ["CPU", "CPU_Mapped"], number
    graph.splits = [Split(start=0, end=1, backend="BLAS")]
    first, second = timeline_of(graph, ["ADD", "MUL"]).ops
    assert first.args.get("buffer") == name
    assert (first.args["backend"], second.args.get("backend")) == ("BLAS", None)


def test_parameters_are_shown_unless_they_are_off_or_undefined() -> None:
    """A scale of 0 is one; no softcap is none."""
    graph = graph_of(["q"], ["a", "b"], [[-1], [0]])
    graph.whole.params[:] = [[0, 0, 0, 10], [0, 0, 1 << 30, 0]]
    first, second = timeline_of(graph, ["FLASH_ATTN_EXT", "FLASH_ATTN_EXT"]).ops
    names = {"scale", "max_bias", "logit_softcap", "prec", "n_kv_max"}
    shown = [{k: v for k, v in op.args.items() if k in names} for op in (first, second)]
    assert shown == [{"scale": 0.0, "prec": "F32"}, {"scale": 0.0, "logit_softcap": 2.0}]


def test_a_tensor_without_a_name_has_the_number_of_its_node() -> None:
    graph = graph_of(["inp"], ["a", ""], [[-1], [0]])
    assert [op.args["tensor"] for op in timeline_of(graph, ["ADD", "MUL"]).ops] == ["a", "node_1"]


def test_what_an_op_does_comes_from_leafs_that_it_reads_through_views() -> None:
    """A view of a view of the cache; a view whose source comes later is of nothing."""
    views = ["v", "w", "k"]
    for src, what in (([[-1], [0], [1]], "read keys from the KV cache"),
                      ([[1], [0], [1]], "copy into contiguous memory")):  # fmt: skip
        graph = graph_of(["cache_k_l0"], views, src)
        graph.whole.exec[:] = [0, 0, 1]
        graph.whole.op[:] = ["VIEW", "VIEW", "CONT"]
        (op,) = plan_timeline(graph, Plan(t=0, plan=0, graph=0, node=[2])).ops
        assert op.args["what"] == what


def test_an_edge_leads_through_views_once_and_never_to_the_kernel_itself() -> None:
    graph = graph_of(["inp"], ["a", "v", "b", "c"], [[-1], [0], [1, 1, 0], [2]])
    graph.whole.exec[1] = 0
    plan = Plan(t=0, plan=0, graph=0, node=[0, 2], n=[1, 2])
    assert plan_timeline(graph, plan).edges == [(0, 1)]


def test_the_name_of_a_layer() -> None:
    assert [layer_name(layer) for layer in (-1, 0, 7)] == ["no layer", "layer 0", "layer 7"]
