"""The inventory counts every node once, with the work that the kernels of a compute have."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.ops import (
    Count,
    Kind,
    count_ops,
    ops_of_log,
    ops_report,
    phase_title,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.report.report import BOUND, AtMost
from tests.kit.computes import one_by_one
from tests.kit.made_log import make_log
from tests.kit.reports import rows, session_of
from tests.kit.sketched_log import Sketch

LOG = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"


@pytest.fixture(scope="module")
def session() -> Session:
    return load_session(LOG)


def test_the_work_of_a_compute_is_that_of_its_kernels(session: Session) -> None:
    for ops in one_by_one(session.ops):
        graph = session.graphs[session.plans[ops.plan].graph]
        found = count_ops(graph, session.ubatches[ops.compute])
        assert sum(count.n for count in found.values()) == graph.n_nodes
        work = session.work(ops.all).of_computes()
        assert sum(count.flops for count in found.values()) == work.flops[0]


def test_a_row_says_what_the_op_is_and_which_weights_it_reads(session: Session) -> None:
    prefill, decode = ops_of_log(session)
    assert prefill.title == "Ops of a prefill, 5 tokens"
    assert decode.title == "Ops of a decode, 1 token"
    up = next(row for row in rows(decode) if row["weights"] == "ffn_gate, ffn_up")
    assert (up["op"], up["inputs"], up["output"]) == (
        "MUL_MAT", "f16[256×768], f32[256]", "f32[768]",
    )  # fmt: skip
    assert up["count"] == 8  # two in each of four layers
    assert up["FLOPs"] == 8 * 2 * 256 * 768
    assert up["ONNX, opset 23"] == "MatMul"
    gate = next(row for row in rows(decode) if row["op"] == "GLU")
    assert gate["parameters"] == "kind=SWIGLU"
    assert gate["ONNX, opset 23"] == "Split + Sigmoid + Mul + Mul"


def test_work_that_the_mask_may_hide_is_a_bound(session: Session) -> None:
    graph = session.graphs[session.plans[session.ops[-1].plan].graph]
    report = ops_report("", count_ops(graph))
    column = [column.name for column in report.columns].index("FLOPs")
    (attention,) = [row for row in report.rows if row[1] == "FLASH_ATTN_EXT"]
    assert isinstance(attention[column], AtMost)


def test_a_log_without_graphs_is_refused(tmp_path: Path) -> None:
    session = session_of(tmp_path / "a.log", make_log(Random(3).randint, level="minimal"))
    with pytest.raises(UsageError, match=r"no graphs; record with --level detailed"):
        ops_of_log(session)


def with_computes(path: Path, computes: list[tuple[int, int]], first: int = 0) -> Session:
    """Steps of these tokens, each with one compute of a graph; the log begins at a position."""
    sketch = Sketch()
    sketch.pos = first
    (graph,) = (event for event in sketch.events if isinstance(event, s.Graph))
    assert graph.nodes is not None
    for number in (1, 2):
        nodes = replace(graph.nodes, op=["MUL_MAT", "MUL"], ne=[[8 * (number + 1)]] * 2)
        sketch.events.append(replace(graph, graph=number, nodes=nodes))
    for number, tokens in computes:
        sketch.step(1000, tokens, sampled=0)
        for event in sketch.events:
            if isinstance(event, s.Compute) and event.compute == sketch.n_computes - 1:
                event.graph = number
    return session_of(path, sketch.events)


def outputs(session: Session) -> list[tuple[str, set[str]]]:
    return [(of.title, {row["output"] for row in rows(of)}) for of in ops_of_log(session)]


SIZES = ["f32[8]", "f32[16]", "f32[24]"]


@pytest.mark.parametrize(
    ("computes", "chosen"), [([0, 1, 1], 1), ([1, 1, 2, 2, 2], 2), ([0, 0, 1], 0), ([0, 1], 0)]
)
def test_the_graph_of_decodes_is_the_one_that_most_computed(
    computes: list[int], chosen: int, tmp_path: Path
) -> None:
    session = with_computes(tmp_path / "a.log", [(number, 1) for number in computes], first=1)
    assert outputs(session) == [("Ops of a decode, 1 token", {SIZES[chosen]})]


@pytest.mark.parametrize(
    ("computes", "title", "chosen"),
    [([(0, 4), (1, 9), (2, 5)], "9 tokens", 1), ([(0, 4), (1, 4), (1, 4)], "4 tokens", 1),
     ([(2, 9), (1, 4), (1, 4)], "9 tokens", 2)],
)  # fmt: skip
def test_the_graph_of_prompts_is_the_one_with_the_most_tokens(
    computes: list[tuple[int, int]], title: str, chosen: int, tmp_path: Path
) -> None:
    session = with_computes(tmp_path / "a.log", computes)
    assert outputs(session) == [(f"Ops of a prefill, {title}", {SIZES[chosen]})]


def test_titles_have_an_article() -> None:
    assert phase_title("encode", 1) == "Ops of an encode, 1 token"
    assert phase_title("decode", 2) == "Ops of a decode, 2 tokens"


def kind(op: str, **params: float | str) -> Kind:
    return Kind(op, tuple(params.items()), ("f32[8]", "f16[8×4]"), "f32[4]")


def test_rows_are_in_order_of_their_work() -> None:
    """First the FLOPs, then the bytes; a view has neither."""
    report = ops_report("Ops", {
        kind("ADD"): Count(1, 8, 50), kind("MUL", a=1): Count(2, 8, 60),
        kind("VIEW"): Count(3), kind("SILU", scale=0.123456789): Count(4, 9, 1, weights=["x", "y"]),
    })  # fmt: skip
    ops = rows(report)
    assert [row["op"] for row in ops] == ["SILU", "MUL", "ADD", "VIEW"]
    assert [row["#"] for row in ops] == ["1", "2", "3", "4"]
    assert [(row["FLOPs"], row["bytes"]) for row in ops] == [(9, 1), (8, 60), (8, 50), (None,) * 2]
    assert [row["weights"] for row in ops] == ["x, y", None, None, None]
    assert [row["parameters"] for row in ops] == ["scale=0.123457", "a=1", "", ""]
    assert ops[0]["inputs"] == "f32[8], f16[8×4]"
    assert report.figures == {"nodes": (10, "count"), "views": (3, "count")}
    assert report.notes[0] == "10 nodes; no kernel runs for 3 views among them."
    assert BOUND not in report.notes


def test_ops_without_a_standard_operator_are_named_once() -> None:
    found = {kind("NO_SUCH_OP", a=i): Count(1, 1, 1) for i in range(2)}
    report = ops_report("Ops", {**found, kind("ANOTHER_ONE"): Count(1, 1, 1, bound=True)})
    assert report.notes == [
        "3 nodes; no kernel runs for 0 views among them.",
        "No standard ONNX operator computes ANOTHER_ONE, NO_SUCH_OP.",
        BOUND,
    ]
    assert rows(ops_report("Ops", found))[0]["ONNX, opset 23"] is None
