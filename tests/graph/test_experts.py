"""The experts of the log of `tests.kit.experts_log` by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llamacpp_instr.converters.analyses.ops import count_ops
from llamacpp_instr.converters.exports.tables import load_tables
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.graph.experts import choices
from llamacpp_instr.log.session import Session, load_session
from tests.kit.experts_log import EXPERT, LOG, events, without_experts
from tests.kit.log_readers import findings
from tests.kit.made_log import encode

READ = [[3, 4], [2, 2], [2, 2]]
"""experts that each compute read in the two layers"""


def read_by_experts(session: Session) -> list[list[tuple[int, bool]]]:
    """The bytes of experts in each MUL_MAT_ID of each compute, and whether they are a bound."""
    found = []
    for ops in session.ops:
        graph = session.graphs[session.plans[ops.plan].graph]
        cells = session.work(ops).cells()
        for row in range(len(ops)):
            found.append([
                (int(cells.bytes[row, k]) - rest(graph, node), bool(cells.bound[row, k]))
                for k, (node,) in enumerate(session.kernels(ops.plan).nodes)
                if graph.whole.op[node] == "MUL_MAT_ID"
            ])  # fmt: skip
    return found


def rest(graph: s.Graph, node: int) -> int:
    """Bytes of the tokens, of their ids and of the result."""
    nodes = graph.whole
    n_tokens = graph.leafs[-1].ne[0]
    tokens = nodes.bytes[nodes.src[node][1]]
    return tokens + n_tokens * 2 * 4 + nodes.bytes[node]


def test_a_node_reads_the_experts_that_its_compute_used() -> None:
    session = load_session(LOG)
    exact = [[(n * EXPERT, False) for n in of for _ in ("up", "down")] for of in READ]
    assert read_by_experts(session) == exact
    ops = load_tables(LOG).ops
    assert not ops.work_bound.any()


def test_without_the_experts_those_of_several_tokens_are_a_bound(tmp_path: Path) -> None:
    """Six ids can name all 4 experts; two ids of one token name two."""
    session = without_experts(tmp_path / "old.log")
    of_token = [[(2 * EXPERT, False)] * 4] * 2
    assert read_by_experts(session) == [[(4 * EXPERT, True)] * 4, *of_token]


@pytest.mark.parametrize("with_experts", [True, False])
def test_one_compute_counts_as_it_does_among_others(with_experts: bool, tmp_path: Path) -> None:
    session = load_session(LOG) if with_experts else without_experts(tmp_path / "old.log")
    for ops in session.ops:
        graph = session.graphs[session.plans[ops.plan].graph]
        kernels, cells = session.kernels(ops.plan), session.work(ops).cells()
        for row, compute in enumerate(ops.compute.tolist()):
            alone = kernels.work(session.ubatches[compute])
            for name in ("flops", "bytes", "bound"):
                assert getattr(alone, name).tolist() == getattr(cells, name)[row].tolist()
            counted = count_ops(graph, session.ubatches[compute]).values()
            assert sum(of.bytes for of in counted) == alone.bytes.sum()
            assert any(of.bound for of in counted) == alone.bound.any()
        unknown = kernels.work(None)
        assert unknown.bound.any() == (len(ops) == 1)


def test_nodes_that_read_the_same_ids_choose_together() -> None:
    (graph, *_) = (e for e in events() if isinstance(e, s.Graph))
    assert {node: of.node for node, of in choices(graph).items()} == {4: 4, 5: 4, 10: 10, 11: 10}
    graph.whole.exec[4] = 0
    assert {node: of.node for node, of in choices(graph).items()} == {5: 5, 10: 10, 11: 10}
    graph.whole.src[11] = graph.whole.src[11][:2]
    assert set(choices(graph)) == {5, 10}


def changed(**changes: Any) -> Callable[[list[s.Event]], None]:
    def change(found: list[s.Event]) -> None:
        at = next(i for i, event in enumerate(found) if isinstance(event, s.Experts))
        found[at] = msgspec.structs.replace(found[at], **changes)

    return change


def again(found: list[s.Event]) -> None:
    at = next(i for i, event in enumerate(found) if isinstance(event, s.Experts))
    found.insert(at, found[at])


def damaged(found: list[s.Event]) -> None:
    """Then it is not known whether its nodes choose experts."""
    graph = next(event for event in found if isinstance(event, s.Graph))
    graph.whole.src[0] = [-99]


def many(found: list[s.Event]) -> None:
    graph = next(event for event in found if isinstance(event, s.Graph))
    for leaf in graph.leafs:
        leaf.ne[2:3] = [2**40] * (len(leaf.ne) > 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(compute=9), "compute 9 was never given"),
        (changed(node=[4]), "column `expert` has 2 entries, `node` has 1"),
        (changed(uses=[[1]]), "column `uses` has 1 entries, `node` has 2"),
        (changed(node=[5, 10]), "node 5 is not the first that reads its ids of experts"),
        (changed(node=[99, 10]), "node 99 is not the first that reads its ids of experts"),
        (changed(uses=[[1, 2], [3, 1, 1, 1]]), "2 uses of 3 experts of node 4"),
        (changed(expert=[[0, 1, 4], [0, 1, 2, 3]]), "expert 4 of node 4, which has 4"),
        (
            changed(expert=[[0, 1, 1, 2, 3], [0, 1, 2, 3]]),
            "5 experts of node 4, whose ids name 4 at most",
        ),
        (
            changed(uses=[[1, 2, 2], [3, 1, 1, 1]]),
            "experts of node 4 were used 5 times, it has 6 ids",
        ),
        (changed(expert=[[0, 3, 1], [0, 1, 2, 3]]), "the experts of node 4 are not in order"),
        (changed(uses=None), "experts of node 4 were used 3 times, it has 6 ids"),
        (changed(uses=[[0, 3, 3], [3, 1, 1, 1]]), "Expected `int` >= 1 - at `uses[0][0]`"),
        (again, "the experts of compute 0 were given before"),
        (many, f"node 4 has {2**40} experts, more than 4096"),
        (damaged, "node 4 is not the first that reads its ids of experts"),
    ],
)
def test_what_is_wrong_with_experts_is_found(
    change: Callable[[list[s.Event]], None], message: str, tmp_path: Path
) -> None:
    found = events()
    change(found)
    messages = [text for _, text in findings(tmp_path / "a.log", encode(found))]
    assert f"experts: {message}" in messages
