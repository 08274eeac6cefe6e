"""A graph is written as what differs from an earlier one, or in columns with each value once."""

from __future__ import annotations

from random import Random

import msgspec
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


# --- a graph that is like none ---


def coded(graph: s.Graph) -> s.Graph:
    """The graph as the recorder writes it: in coded columns, its weights by their ids."""
    nodes, columns = graph.whole, {}
    for name in ("op", "type", "ne", "bytes", "params"):
        column = getattr(nodes, name)
        values = list({str(value): value for value in column}.values())
        columns[name] = {"values": values, "at": [values.index(value) for value in column]}
    left = msgspec.to_builtins(nodes)
    changes = msgspec.convert(columns, s.Changes)
    nodes = msgspec.convert({k: v for k, v in left.items() if k not in columns}, s.Nodes)
    leafs = [s.Leaf(tensor=of.tensor) if of.tensor >= 0 else of for of in graph.leafs]
    return replace(graph, nodes=nodes, changes=changes, leafs=leafs)


def test_columns_that_name_each_value_once_and_weights_by_their_ids_are_the_whole_graph() -> None:
    refs, graph, _ = taken()
    assert any(leaf.tensor >= 0 for leaf in graph.leafs)
    written = coded(graph)
    assert len(msgspec.json.encode(written)) < len(msgspec.json.encode(graph))
    events = make_log(Random(4).randint, n_contexts=1, level="verbose")
    weights = {event.tensor: event for event in events if isinstance(event, s.Tensor)}
    whole = refs.whole(written)
    for leaf, before in zip(whole.leafs, graph.leafs, strict=True):
        of = weights.get(leaf.tensor, before)
        assert all(getattr(leaf, name) == getattr(of, name) for name in leaf.__struct_fields__)
    assert whole.changes is None
    assert whole.whole == graph.whole


def test_a_weight_must_have_been_given_and_a_place_needs_a_value() -> None:
    refs, graph, _ = taken()
    again = replace(coded(graph), graph=99)
    unknown = replace(again, leafs=[s.Leaf(tensor=77)])
    assert list(refs.problems(refs.whole(unknown))) == ["it reads tensor 77, which was never given"]
    for changes in (s.Changes(bytes=s.CodedNumbers([1], [1])), s.Changes(op=s.CodedNames([]))):
        wrong = replace(again, changes=changes)
        assert list(refs.problems(refs.whole(wrong))) == ["its `changes` do not fit its nodes"]
