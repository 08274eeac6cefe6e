"""Parts of kernels: work is conserved, no dependency is lost, heads are wired as attention is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.scheduling.sources import recorded_graph
from llamacpp_instr.converters.scheduling.split import (
    Divided,
    Split,
    _is_weight,
    _stage_of,
    divide,
    part_shapes,
)
from llamacpp_instr.converters.scheduling.tasks import EngineKind, Engines, equal_engines
from llamacpp_instr.converters.scheduling.timed_graph import Axes, Need, TimedGraph
from llamacpp_instr.log.session import load_session
from llamacpp_instr.prediction.probe.file import (
    ATTENTION_PARTS,
    SCALED_NORM_PARTS,
    SOFT_MAX_PARTS,
    AttentionShape,
    ScaledNormShape,
)
from tests.kit.native_kit import ROOT, random_model
from tests.kit.schedule_kit import edges, sources_of

KINDS = (
    "llama-dense", "llama-moe", "gemma2-dense", "olmo2-dense", "granite-dense", "gpt2-dense",
    "deepseek2-moe", "grok-moe", "falcon-h1-dense", "qwen3next-moe",
)  # fmt: skip
DEMO = ROOT / "tests" / "fixtures" / "demo-verbose.log"


@cache
def demo(phase: str = "decode") -> TimedGraph:
    return recorded_graph(load_session(DEMO), phase).timed


def kernel_edges(divided: Divided) -> set[tuple[int, int]]:
    return {(divided.kernel[a], divided.kernel[b]) for a, b in edges(divided.tasks)}


def check(timed: TimedGraph, split: Split, engines: int) -> None:
    whole, divided = (divide(timed, of, equal_engines(engines)) for of in ("none", split))
    tasks = divided.tasks
    assert np.bincount(divided.kernel, tasks.ns).tolist() == timed.ns.tolist()
    for column in ("bytes", "load"):
        amounts = np.bincount(divided.kernel, getattr(tasks, column))
        assert (amounts >= getattr(timed, column)).all()
        if split in ("none", "heads"):
            assert amounts.tolist() == getattr(timed, column).tolist()
    assert all(source < task for source, task in edges(tasks))
    assert len({label.name for label in tasks.labels}) == len(tasks.labels)
    assert kernel_edges(divided) == kernel_edges(whole)
    assert len(edges(tasks)) == len(tasks.sources), "none waits twice for another"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("engines", [1, 3, 4])
@pytest.mark.parametrize("split", get_args(Split))
def test_work_and_dependencies_are_conserved(split: Split, engines: int, phase: str) -> None:
    check(demo(phase), split, engines)


def test_rows_are_divided_as_ggml_divides_them() -> None:
    timed = demo()
    divided = divide(timed, "rows", equal_engines(2))
    parts: defaultdict[str, set[int]] = defaultdict(set)
    for kernel in timed.chosen:
        op = timed.nodes.op[timed.inside[kernel][0]]
        parts[op].add(divided.kernel.count(kernel))
    # for one token: a product by the rows of its weight, positions by heads, one row of the rest
    assert parts["MUL_MAT"] == parts["ROPE"] == parts["FLASH_ATTN_EXT"] == {2}
    assert parts["RMS_NORM"] == parts["ADD"] == parts["GLU"] == parts["SET_ROWS"] == {1}


def test_as_many_parts_as_engines_can_run_the_op() -> None:
    kinds = (EngineKind("m", 3, frozenset({"matrix"})), EngineKind("v", 2, frozenset({"vector"})))
    divided = divide(demo(), "rows", Engines((*kinds, EngineKind("any", 1))))
    counts = {label.op: divided.kernel.count(divided.kernel[i])
              for i, label in enumerate(divided.tasks.labels)}  # fmt: skip
    assert counts["MUL_MAT"] == 4
    assert counts["ROPE"] == 2 or counts["ROPE"] == 3
    assert counts["RMS_NORM"] == 1


def wiring(timed: TimedGraph, divided: Divided) -> int:
    """Checks that query head h reads the keys and values of its head; returns how many did."""
    axes, tasks, seen = Axes(timed), divided.tasks, 0
    names = [label.name for label in tasks.labels]
    for kernel in timed.chosen:
        (node, *_) = timed.inside[kernel]
        if timed.nodes.op[node] != "FLASH_ATTN_EXT":
            continue
        query, key = (axes.shape(of) for of in timed.nodes.src[node][:2])
        heads, kv_heads = query[2], key[2]
        mine = [i for i, of in enumerate(divided.kernel) if of == kernel]
        assert len(mine) == heads
        for head, task in enumerate(mine):
            for source in sources_of(tasks, task):
                of = divided.kernel[source]
                n = divided.kernel.count(of)
                if timed.nodes.op[timed.inside[of][0]] == "SET_ROWS" and n > 1:
                    assert n == kv_heads
                    assert source - divided.kernel.index(of) == head // (heads // kv_heads), names
                    seen += 1
    return seen


def test_heads_share_keys_and_values() -> None:
    timed = demo()
    divided = divide(timed, "heads", equal_engines(4))
    assert wiring(timed, divided) == 2 * 4 * 4  # keys and values of 4 heads of 4 layers
    assert re.search(r"\d+ tasks of 73 kernels", divided.notes[0])


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of upstream's random models of several kinds."""
    folder, models = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("models")
    for name in KINDS:
        (models / f"{name}.gguf").symlink_to(random_model(name))
    script = ROOT / "tests" / "kit" / "probe_architectures.py"
    command = [sys.executable, str(script), str(models), "record", str(folder)]
    subprocess.run(command, check=True, capture_output=True, env=dict(os.environ))
    return folder


@pytest.mark.native
def test_every_kind_of_model_is_divided(logs: Path) -> None:
    seen = 0
    for log in sorted(logs.glob("*.log")):
        for phase in ("prefill", "decode"):
            try:
                timed = recorded_graph(load_session(log), phase).timed
            except UsageError:
                continue  # these recordings may have no prefill
            for split in get_args(Split):
                check(timed, split, 3)
            seen += wiring(timed, divide(timed, "heads", equal_engines(3)))
    assert seen > 30


def test_measured_parts_take_the_place_of_attention() -> None:
    timed = demo()
    shapes = {k: of for k, of in part_shapes(timed).items() if isinstance(of, AttentionShape)}
    assert {of.fused for of in shapes.values()} == {True}
    assert len(shapes) == 4
    (shape, *_) = shapes.values()
    assert (shape.heads, shape.kv_heads, shape.key, shape.tokens) == (4, 2, 64, 1)
    assert 0 < shape.cells < 256, "not the window of the cache"
    times = {kernel: dict.fromkeys(ATTENTION_PARTS, 4000.0) for kernel in shapes}
    tasks = (divided := divide(timed, "heads", equal_engines(4), times)).tasks
    for kernel in shapes:
        mine = [i for i, of in enumerate(divided.kernel) if of == kernel]
        assert len(mine) == 4 * 5
        for head in range(4):
            chain = mine[5 * head : 5 * head + 5]
            assert [tasks.labels[i].op for i in chain] == list(ATTENTION_PARTS)
            assert tasks.ns[chain].tolist() == [1000] * 5
            before = [sources_of(tasks, i) for i in chain]
            assert all(chain[i] in before[i + 1] for i in range(4))
            # keys and the query before the dot product, values before the weighted sum alone
            of = [{tasks.labels[i].title for i in sources} for sources in before]
            assert of[0] == {"ROPE Qcur", "SET_ROWS cache_k"}
            assert of[4] == {"NORMALIZATION", "SET_ROWS cache_v"}
            assert [len(sources) for sources in before[1:4]] == [1, 1, 1]
    first, *others = divided.notes
    made = f"--split heads made {len(divided.kernel)} tasks of {len(timed.chosen)} kernels."
    assert first.startswith(made)
    recorded = sum(float(timed.ns[kernel]) for kernel in shapes)
    expected = f"together 80.0 µs; FLASH_ATTN_EXT took {recorded / 1000:.1f} µs in the log."
    assert [note.partition("several runs: ")[2] for note in others] == [expected]


def test_a_fused_norm_becomes_its_two_ops() -> None:
    timed = demo()
    norms = {k: of for k, of in part_shapes(timed).items() if isinstance(of, ScaledNormShape)}
    assert len(norms) == 9, "two of each of four layers, and the last one"
    assert set(norms.values()) == {ScaledNormShape(256, 1)}
    times = {kernel: dict(zip(SCALED_NORM_PARTS, (700.0, 200.0), strict=True)) for kernel in norms}
    tasks = (divided := divide(timed, "heads", equal_engines(4), times)).tasks
    for kernel in norms:
        norm, product = (i for i, of in enumerate(divided.kernel) if of == kernel)
        assert [tasks.labels[i].op for i in (norm, product)] == list(SCALED_NORM_PARTS)
        assert [tasks.labels[i].kind for i in (norm, product)] == ["vector", "vector"]
        assert tasks.ns[[norm, product]].tolist() == [700, 200]
        assert sources_of(tasks, product) == [norm]
        assert tasks.load[[norm, product]].tolist() == [0, 4 * 256], "the weight"
        assert tasks.bytes[[norm, product]].sum() == timed.bytes[kernel]


@pytest.mark.native
def test_a_part_waits_for_what_it_reads() -> None:
    """The first part waits for all sources, except for the values of attention and for what the
    product of a fused norm reads from another node."""
    need = [Need(0, source, None) for source in (0, 1, 2, 9)]
    assert [_stage_of(of, ATTENTION_PARTS) for of in need] == [0, 0, 4, 4]
    assert [_stage_of(of, SCALED_NORM_PARTS) for of in need] == [0, 0, 0, 1]


@pytest.mark.native
def test_parts_are_timed_at_their_shape() -> None:
    from llamacpp_instr.prediction.probe.measure import time_parts

    one, many = (time_parts(ScaledNormShape(4096, rows)) for rows in (1, 64))
    assert tuple(one) == SCALED_NORM_PARTS
    assert all(many[part] > 4 * one[part] > 0 for part in SCALED_NORM_PARTS)
    with pytest.raises(UsageError, match="too large"):
        time_parts(ScaledNormShape(4096, 1 << 13))
    shape = AttentionShape(2, 4, 2, 48, 32, 64, "f16", "q8_0", fused=True)
    times = time_parts(shape)
    assert tuple(sorted(times)) == tuple(sorted(ATTENTION_PARTS))
    assert min(times.values()) > 0
    alone = time_parts(AttentionShape(2, 4, 1, 48, 1, 1, "f32", "f32", fused=False))
    assert tuple(alone) == SOFT_MAX_PARTS
    with pytest.raises(UsageError, match="too large"):
        time_parts(AttentionShape(512, 32, 8, 8192, 64, 64, "f16", "f16", fused=True))
    with pytest.raises(UsageError, match="bf16"):
        time_parts(AttentionShape(1, 4, 2, 48, 32, 64, "bf16", "bf16", fused=True))


def test_a_source_is_a_weight_as_its_leaf_says() -> None:
    timed = demo()
    weights = [name.endswith(".weight") for name in (leaf.name for leaf in timed.graph.leafs)]
    assert 0 < sum(weights) < len(weights)
    assert [_is_weight(timed, -1 - i) for i in range(len(weights))] == weights
    nodes = timed.nodes
    views = [i for i, ran in enumerate(nodes.exec) if not ran and nodes.src[i][:1] < [0]]
    assert views
    assert [_is_weight(timed, i) for i in views] == [weights[-1 - nodes.src[i][0]] for i in views]
    assert not _is_weight(timed, nodes.exec.index(1)), "what is computed"
