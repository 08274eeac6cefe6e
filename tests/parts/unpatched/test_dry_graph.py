"""A graph of a dry run is the one that a real decode computes, for every architecture, and the plan
that is derived from it is the one that ggml runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.log import schema
from llamacpp_instr.log.graph.kernels import cpu_plan
from llamacpp_instr.log.session import load_session
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.recording.memory.plan import UbatchShape, _dry_graphs, dry_graphs, window
from tests.kit.log_readers import whole_events
from tests.kit.native_kit import DEMO, ROOT, random_model, random_models

pytestmark = pytest.mark.native

SHAPES = ("ne", "bytes", "params")
"""columns that depend on the cells in use"""
BLOCKS_OF_CELLS = {"glm5-next-moe"}
"""whose sparse attention counts blocks of the cells in use, not of the window"""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("architectures")
    script = ROOT / "tests" / "kit" / "probe_architectures.py"
    subprocess.run(
        [sys.executable, str(script), str(random_models()), "record", str(folder)],
        env=dict(os.environ), check=True, capture_output=True,
    )  # fmt: skip
    return sorted(folder.glob("*.log"))


def test_the_plan_of_a_graph_is_the_one_that_ran(logs: list[Path]) -> None:
    compared = fused = 0
    for log in logs:
        graphs: dict[int, schema.Graph] = {}
        for event in whole_events(log):
            if isinstance(event, schema.Graph):
                graphs[event.graph] = event
            elif isinstance(event, schema.Plan):
                assert kernels(cpu_plan(graphs[event.graph])) == kernels(event), log.stem
                compared += 1
                fused += event.n is not None
    assert compared > fused > len(logs)


def kernels(plan: schema.Plan) -> list[tuple[int, int]]:
    return list(zip(plan.node, plan.n or [1] * len(plan.node), strict=True))


def test_the_dry_graph_is_the_recorded_one(logs: list[Path]) -> None:
    findings = [differences(log) for log in logs]
    assert [finding for finding in findings if finding] == []
    assert len(findings) >= 120


def differences(log: Path) -> str:
    """What differs between the last graph of a log and the dry one; empty for nothing."""
    session = load_session(log)
    recorded = session.graphs[int(session.computes["graph"][-1])]
    tokens = int(session.computes["n_tokens"][-1])
    options = ContextOptions(batch=40, ubatch=40 if tokens > 1 else 32)
    model = load_model_file(random_model(log.stem))
    # here, not in a child like `dry_graphs`, which spends most of its time starting
    (dry,) = _dry_graphs(model, options, [UbatchShape(tokens, past=40)])
    assert dry.source == "reserve"
    assert recorded.nodes is not None
    assert dry.nodes is not None
    for column in ("op", "name", "layer", "type", "src", "exec"):
        if getattr(recorded.nodes, column) != getattr(dry.nodes, column):
            return f"{log.stem}: {column}"
    leafs = [[(leaf.name, leaf.type, leaf.tensor) for leaf in g.leafs] for g in (recorded, dry)]
    buffers = [
        [leaf.buffer.replace("_Mapped", "") for leaf in g.leafs if leaf.tensor >= 0]
        for g in (recorded, dry)
    ]
    if leafs[0] != leafs[1] or buffers[0] != buffers[1]:
        return f"{log.stem}: leafs"
    if log.stem in BLOCKS_OF_CELLS:
        return ""
    for column in SHAPES:
        pairs = zip(getattr(recorded.nodes, column), getattr(dry.nodes, column), strict=True)
        for i, (one, other) in enumerate(pairs):
            # a reserved graph clears a recurrent state, a decode clears none
            cleared = 0 in recorded.nodes.ne[i]
            if one != other and not cleared:
                return f"{log.stem}: {column} of node {i}"
    return ""


def test_the_window_is_a_multiple_of_256_cells() -> None:
    assert [window(UbatchShape(1, past)) for past in (0, 255, 256, 2048)] == [256, 256, 512, 2304]
    demo = load_model_file(DEMO)
    (graph,) = dry_graphs(demo, ContextOptions(), [UbatchShape(1, past=300)])
    assert graph.nodes is not None
    at = graph.nodes.op.index("FLASH_ATTN_EXT")
    assert graph.nodes.ne[graph.nodes.src[at][1]][1] == 512


def test_an_impossible_ubatch_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a ubatch"):
        dry_graphs(load_model_file(DEMO), ContextOptions(), [UbatchShape(0)])
