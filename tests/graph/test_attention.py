"""The FLOPs of attention against ggml's own kernel with a counter (`tests.kit.attention_truth`).

A figure without the mark of a bound must be equal, one with it must not be smaller.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.converters.analyses.stats import compute_stats
from llamacpp_instr.converters.exports.tables import load_tables
from llamacpp_instr.log.graph.attention import Attention, Seen, Span, Ubatch, attention_work
from llamacpp_instr.log.session import load_session
from llamacpp_instr.report.render import render_text
from tests.kit.attention_truth import counts
from tests.kit.computes import one_by_one
from tests.kit.native_kit import DEMO, random_model
from tests.kit.reports import rows

pytestmark = pytest.mark.native

TEXT: list[Any] = [
    *([[0, 0, 70]], [[0, 70, 1]], [[0, 71, 1]], [[0, 72, 180]]),
    *([[0, n, 1]] for n in range(252, 260)),
]
"""a prompt, tokens one by one, a second prompt, and tokens beyond the first 256 cells"""
TEXT_LATER = [[[0, 32, 60]], [[0, 92, 1]], [[0, 93, 80]]]
SMALL = {"n_ctx": 512, "n_batch": 256, "n_ubatch": 256, "n_threads": 2, "n_threads_batch": 2}


def flops_of(log: Path) -> tuple[list[int], list[bool]]:
    """FLOPs of attention in each step, and whether they are a bound."""
    session = load_session(log)
    step_of = dict(
        zip(session.computes["compute"].tolist(), session.computes["step"].tolist(), strict=True)
    )
    n_flops: dict[int, int] = defaultdict(int)
    bounds: dict[int, bool] = defaultdict(bool)
    for ops in one_by_one(session.ops):
        if ops.thread == 0:
            work, step = session.work(ops.all).total([0]), step_of[ops.compute]
            attention = session.kernels(ops.plan).attention
            n_flops[step] += int(work.flops[list(attention)].sum())
            bounds[step] |= bool(work.bound.any())
    steps = session.steps["step"].tolist()
    return [n_flops[step] for step in steps], [bounds[step] for step in steps]


@pytest.mark.parametrize(
    "settings",
    [
        {"n_threads_batch": 3, "n_ubatch": 100},
        # GGML_TYPE_Q8_0: no tiles
        {"type_k": 8, "type_v": 8, "n_threads": 1, "n_threads_batch": 1},
        # GGML_TYPE_F32
        {"type_k": 0, "type_v": 0, "n_threads": 1},
        {"n_seq_max": 4, "n_ctx": 2048},
    ],
)
def test_one_sequence_is_counted_exactly(tmp_path: Path, settings: dict[str, int]) -> None:
    batches = [*TEXT, ["remove", 0, 250, -1], [[0, 250, 3]]]
    counted = counts(DEMO, tmp_path / "a.log", SMALL | settings, batches)
    assert flops_of(tmp_path / "a.log") == (counted, [False] * len(counted))


@pytest.mark.parametrize("ubatch", [48, 64])
def test_a_window_that_slides(tmp_path: Path, ubatch: int) -> None:
    """It is counted exactly, even once cells behind it are taken again; tiles are then a bound."""
    model = random_model("gemma3-dense")
    settings = SMALL | {"n_ctx": 1024, "swa_full": False, "n_ubatch": ubatch}
    batches = [*TEXT, [[0, 260, 200]], [[0, 460, 1]]]
    counted = counts(model, tmp_path / "a.log", settings, batches)
    flops, bounds = flops_of(tmp_path / "a.log")
    assert bounds == [ubatch == 64 and n == 200 for ((_, _, n),) in batches]
    for of, n, bound in zip(flops, counted, bounds, strict=True):
        assert of > n if bound else of == n


def test_where_two_caches_look_alike_a_window_gives_a_bound(tmp_path: Path) -> None:
    model = random_model("gemma3-dense")
    batches = [[[0, 0, 32]], *TEXT_LATER]
    counted = counts(model, tmp_path / "a.log", SMALL | {"swa_full": True}, batches)
    flops, bounds = flops_of(tmp_path / "a.log")
    # within the window, both give the same
    assert flops[0] == counted[0]
    assert bounds == [False] + [True] * len(TEXT_LATER)
    assert all(of > n for of, n in zip(flops[1:], counted[1:], strict=True))
    report = compute_stats(load_session(tmp_path / "a.log"))[0]
    labelled = {row["op"]: row["at_most"] for row in rows(report) if "at_most" in row}
    assert labelled == {"FLASH_ATTN_EXT": ["FLOP/s", "bytes/s"]}
    assert render_text([report]).count("≤") == 3  # two rates, and the note
    ops = load_tables(tmp_path / "a.log").ops
    assert set(ops.op[ops.work_bound]) == {"FLASH_ATTN_EXT"}


@pytest.mark.parametrize("unified", [True, False])
def test_several_sequences(tmp_path: Path, unified: bool) -> None:
    settings = SMALL | {"n_ctx": 1024, "n_seq_max": 3, "kv_unified": unified}
    lengths = (20, 7, 11)
    batches: list[Any] = [[[seq, 0, n]] for seq, n in enumerate(lengths)]
    batches += [[[seq, n + i, 1] for seq, n in enumerate(lengths)] for i in range(4)]
    counted = counts(DEMO, tmp_path / "a.log", settings, batches)
    assert flops_of(tmp_path / "a.log") == (counted, [False] * 7)


def test_a_model_without_a_cache_is_counted_exactly(tmp_path: Path, models: Path) -> None:
    counted = counts(models / "bert.gguf", tmp_path / "a.log", SMALL, [[[0, 0, 9]], [[0, 0, 70]]])
    assert counted[0]
    assert flops_of(tmp_path / "a.log") == (counted, [False, False])


def test_impossible_sizes_take_no_time() -> None:
    """A log may claim any shape; its kernel then has a bound."""
    shape = Attention(2**40, 2**40, 1, 2**40, 2, 4, True, "cache", 2**40, 1)
    seen = Seen(2**40, (Span(0, 2**40),), dense=True, in_order=True, size=2**40)
    ubatch = Ubatch(2**40, 2**40, (), (seen,), causal=True, window=0, uniform=True)
    assert attention_work(shape, ubatch).bound
