"""The inventory counts every node once, with the work that the kernels of a compute have."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from converters.analyses.ops import count_ops, ops_of_log, ops_report
from converters.report.report import AtMost
from llamacpp_instr.errors import UsageError
from llamacpp_instr.log.session import Session, load_session
from tests.kit.made_log import make_log
from tests.kit.reports import rows, session_of

LOG = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"


@pytest.fixture(scope="module")
def session() -> Session:
    return load_session(LOG)


def test_the_work_of_a_compute_is_that_of_its_kernels(session: Session) -> None:
    for ops in session.ops:
        graph = session.graphs[session.plans[ops.plan].graph]
        found = count_ops(graph, session.ubatches[ops.compute])
        assert sum(count.n for count in found.values()) == graph.n_nodes
        assert sum(count.flops for count in found.values()) == session.work(ops).flops.sum()


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
