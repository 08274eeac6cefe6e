"""A graph that differs from an earlier one in shapes only is written by what differs."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.graph.kernels import graph_like
from llamacpp_instr.log.resolve import Resolver
from tests.kit.made_log import make_log


def taken() -> tuple[Resolver, s.Graph, s.Plan]:
    """A resolver that has taken a log up to its first plan; the graph and the plan."""
    refs = Resolver()
    for line, event in enumerate(make_log(Random(4).randint, n_contexts=1, level="verbose"), 1):
        refs.take(line, event)
        if isinstance(event, s.Plan):
            return refs, refs.graphs[event.graph].event, event
    raise AssertionError


def alike(graph: s.Graph, **changes: object) -> s.Graph:
    """The next graph, like `graph`."""
    found = replace(
        graph, graph=graph.graph + 1, nodes=None, buffers=[], leafs=[], like=graph.graph
    )
    return replace(found, **changes)


def test_a_graph_without_changes_is_the_other_with_an_id_of_its_own() -> None:
    _, graph, _ = taken()
    assert graph_like(alike(graph), graph) == replace(graph, graph=graph.graph + 1)


def test_a_column_has_each_value_once() -> None:
    _, graph, _ = taken()
    at = [i % 2 for i in range(graph.n_nodes)]
    changes = s.Changes(ne=s.CodedShapes([[8, 3], [5]], at), bytes=s.CodedNumbers([96, 20], at))
    found = graph_like(alike(graph, changes=changes), graph).whole
    assert found.ne[:3] == [[8, 3], [5], [8, 3]]
    assert found.bytes[:3] == [96, 20, 96]
    assert found.params == graph.whole.params


def test_without_places_entries_are_equal_where_those_of_the_other_graph_are() -> None:
    _, graph, _ = taken()
    distinct = list(dict.fromkeys(map(tuple, graph.whole.ne)))
    doubled = [[2 * n for n in shape] for shape in distinct]
    found = graph_like(alike(graph, changes=s.Changes(ne=s.CodedShapes(doubled))), graph).whole
    assert found.ne == [[2 * n for n in shape] for shape in graph.whole.ne]


def test_leafs_replace_those_at_their_places() -> None:
    _, graph, _ = taken()
    leaf = replace(graph.leafs[1], ne=[77])
    found = graph_like(alike(graph, leafs=[leaf], leafs_at=[1]), graph)
    assert found.leafs == [graph.leafs[0], leaf, *graph.leafs[2:]]


@pytest.mark.parametrize(
    "changes",
    [
        {"n_nodes": 1},
        {"leafs_at": [0]},
        {"leafs_at": [10**6], "leafs": [s.Leaf(name="x", type="f32", ne=[1], bytes=4)]},
        {"changes": s.Changes(bytes=s.CodedNumbers([1], [1]))},
        {"changes": s.Changes(bytes=s.CodedNumbers([]))},
    ],
)
def test_what_does_not_fit_is_not_whole(changes: dict[str, object]) -> None:
    refs, graph, _ = taken()
    event = alike(graph, **changes)
    assert refs.whole(event) is event
    found = list(refs.problems(event))
    assert found == [f"does not fit graph {graph.graph}, which it is like"]


def test_a_graph_can_only_be_like_one_that_can_be_named() -> None:
    refs, graph, _ = taken()
    event = alike(graph, like=99)
    assert list(refs.problems(refs.whole(event))) == ["graph 99 was never given"]


def test_a_plan_has_the_kernels_of_the_one_that_it_is_like() -> None:
    refs, graph, plan = taken()
    refs.take(9, refs.whole(alike(graph)))
    event = s.Plan(t=plan.t, plan=plan.plan + 1, graph=graph.graph + 1, like=plan.plan)
    whole = refs.whole(event)
    assert list(refs.problems(whole)) == []
    assert whole == replace(plan, plan=plan.plan + 1, graph=graph.graph + 1)
    assert list(refs.problems(refs.whole(replace(event, like=99)))) == ["plan 99 was never given"]
