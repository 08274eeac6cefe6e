"""Graphs and plans in a log are those that ggml computes, read through ggml's own structs."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events as read_log
from llamacpp_instr.log.schema import LEVELS
from tests.conftest import read_events
from tests.kit.native_kit import DEMO, patched_tree, random_model
from tests.kit.programs import native_program

pytestmark = pytest.mark.native

Read = Callable[[str, str], tuple[list[dict[str, Any]], Path]]
NODE_COLUMNS = ("name", "op", "type", "bytes", "layer", "exec")
CLOSE = 50_000
"""nanoseconds that the counter's time may differ from the clock's"""
MODELS = ("demo", "qwen3next-moe", "gemma3-dense")


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """The computes as ggml has them, and the log."""
    folder = tmp_path_factory.mktemp("graphs")
    flags = ("-isystem", str(patched_tree() / "ggml" / "src"))  # others' warnings are not ours
    program = native_program("graph_truth", folder, flags=flags)

    @functools.cache
    def run(name: str, level: str) -> tuple[list[dict[str, Any]], Path]:
        log = folder / f"{name}-{level}.log"
        model = DEMO if name == "demo" else random_model(name)
        done = subprocess.run(
            [program, model, log, level], check=True, capture_output=True, text=True
        )
        assert list(check_log(log)) == []
        return [json.loads(line) for line in done.stdout.splitlines()], log

    return run


def without_ones(ne: list[int]) -> list[int]:
    while len(ne) > 1 and ne[-1] == 1:
        ne = ne[:-1]
    return ne


def without_zeros(params: list[int]) -> list[int]:
    while params and params[-1] == 0:
        params = params[:-1]
    return params


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_is_ggmls(name: str, read: Read) -> None:
    computes, log = read(name, "verbose")
    graphs = {graph["graph"]: graph for graph in read_events(log, "graph")}
    weights = {tensor["tensor"]: tensor["name"] for tensor in read_events(log, "tensor")}
    assert len(computes) == 4
    for compute in computes:
        graph, nodes = graphs[compute["graph"]], compute["nodes"]
        assert graph["uid"] <= compute["uid"], "equal graphs are written once"
        assert graph["n_nodes"] == len(nodes)
        assert graph["n_exec"] == sum(node["exec"] for node in nodes) > 0
        assert graph["splits"] == [{"start": 0, "end": len(nodes), "backend": "CPU"}]
        columns = graph["nodes"]
        for column in (*NODE_COLUMNS, "src"):
            assert columns[column] == [node[column] for node in nodes], column
        shapes = [without_ones(node["ne"]) for node in nodes]
        assert columns["ne"] == shapes
        strides = [node["nb"][: len(ne)] for node, ne in zip(nodes, shapes, strict=True)]
        assert columns["nb"] == strides
        assert columns["params"] == [without_zeros(node["params"]) for node in nodes]
        buffers = [graph["buffers"][at] if at >= 0 else "" for at in columns["buffer"]]
        assert buffers == [node["buffer"] for node in nodes]
        assert len(graph["leafs"]) == len(compute["leafs"])
        for leaf, expected in zip(graph["leafs"], compute["leafs"], strict=True):
            keys = ("name", "type", "bytes")
            assert [leaf[key] for key in keys] == [expected[key] for key in keys]
            assert leaf["ne"] == without_ones(expected["ne"])
            assert leaf.get("buffer", "") == expected["buffer"]
            is_weight = expected["name"] in weights.values()
            assert weights.get(leaf.get("tensor", -1)) == (expected["name"] if is_weight else None)


@pytest.mark.parametrize("name", MODELS)
def test_the_layer_of_a_node_is_that_of_its_name(name: str, read: Read) -> None:
    """llama.cpp names a node of a layer `NAME-LAYER`, and ggml what it makes of it `… (view)`."""
    _, log = read(name, "detailed")
    named = Counter[str]()
    for graph in read_events(log, "graph"):
        assert "nb" not in graph["nodes"]
        for node, layer in zip(graph["nodes"]["name"], graph["nodes"]["layer"], strict=True):
            of_name = re.match(r"(?:.*-|cache_[kv]_l)(\d+)(?: \(.*)?$", node)
            if of_name:
                assert layer == int(of_name[1]), node
                named[graph["source"]] += 1
    assert named["decode"] > 50
    assert name != "demo" or named["memory_update"] == 8


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_there_is_not_written(name: str, level: str, read: Read) -> None:
    """An absent layer or sequence is not -1, and gaps of zero have no column."""
    _, log = read(name, level)
    for line, (_, event) in zip(read_events(log), read_log(log), strict=True):
        written = json.loads(msgspec.json.encode(event))
        assert {key for key, value in line.items() if value == -1} <= written.keys()
        assert any(line.get("gap", [1]))


def test_where_a_graph_comes_from(read: Read) -> None:
    for level in LEVELS:
        computes, log = read("demo", level)
        graphs = read_events(log, "graph")
        origins = [(graph["source"], graph["why"]) for graph in graphs]
        first, changed = ("decode", "first"), ("decode", "changed")
        # a prompt, a token that the next one reuses, a shift, a token
        assert origins[:2] == [first, changed]
        assert origins[2] == ("memory_update", "memory_update")
        assert set(origins[3:]) <= {changed}
        assert [graph["graph"] for graph in graphs] == list(range(len(graphs)))
        assert len({graph["uid"] for graph in graphs}) == len(graphs)
        assert {graph["ctx"] for graph in graphs} == {0}
        assert all(("nodes" in graph) == (level != "minimal") for graph in graphs)
        every = read_events(log, "compute")
        recorded = [c for c in every if c["source"] == "decode"]
        for key in ("compute", "graph", "step", "n_tokens"):
            assert [c[key] for c in recorded] == [c[key] for c in computes], key
        starts = {c["graph"]: c["t"] + c.get("start", 0) for c in reversed(every)}
        assert all(graph["t"] <= starts[graph["graph"]] + CLOSE for graph in graphs)


def test_a_plan_has_every_node_that_runs_once(read: Read) -> None:
    computes, log = read("qwen3next-moe", "detailed")
    plans = {plan["plan"]: plan for plan in read_events(log, "plan")}
    graphs = {compute["graph"]: compute["nodes"] for compute in computes}
    assert list(plans) == list(range(len(plans)))
    by_compute = {c["compute"]: c["graph"] for c in read_events(log, "compute")}
    fused, written = 0, dict[int, int]()
    for ops in read_events(log, "ops"):
        plan = plans[ops["plan"]]
        assert plan["graph"] == by_compute[ops["compute"]]
        written.setdefault(ops["plan"], ops["t"] + sum(ops["dur"]) + sum(ops.get("gap", [])))
        assert plan["t"] >= written[ops["plan"]] - CLOSE, "after its first compute"
        if plan["graph"] in graphs:
            nodes, first = graphs[plan["graph"]], plan["node"]
            count = plan.get("n", [1] * len(first))
            ran = [node for at, n in zip(first, count, strict=True) for node in range(at, at + n)]
            # a fused kernel spans the views between its nodes
            assert [i for i in ran if nodes[i]["exec"]] == [
                i for i, node in enumerate(nodes) if node["exec"]
            ]
            assert first == sorted(set(first))
            fused += "n" in plan
        assert len(ops["dur"]) == len(plan["node"])
    assert fused
