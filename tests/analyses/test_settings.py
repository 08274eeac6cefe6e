"""The facts that affect a measurement, and their differences, in logs written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.analyses.step_times import (
    ALIKE,
    MODEL_FACTS,
    compute_settings,
    differing_facts,
    facts,
    log_names,
    unlike_notes,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch


def session(path: Path, change: Callable[[s.Event], Any] = lambda _: None) -> Session:
    """A prefill of six tokens and two decodes; `change` is called with every event."""
    sketch = Sketch()
    for tokens in (6, 1, 1):
        sketch.step(1000, tokens, sampled=1)
    for event in sketch.events:
        change(event)
    return session_of(path, sketch.events)


def with_threads(n: int) -> Callable[[s.Event], None]:
    def change(event: s.Event) -> None:
        if isinstance(event, s.Context):
            event.n_threads = n

    return change


def test_every_fact_in_words(tmp_path: Path) -> None:
    def change(event: s.Event) -> None:
        if isinstance(event, s.Context):
            event.n_ctx, event.flash_attn, event.causal = 4096, True, False
            event.backends = ["CPU", "BLAS"]

    found = dict(facts(session(tmp_path / "a.log", change), ["prefill", "decode"]))
    known = {
        "level": found["level"], "earlier fork's dialect": "no", "architecture": "llama",
        "file type": "F16", "parameters": "1,000,000", "weights, bytes": "2,000,000",
        "llama-cpp-python": "0.3.36+instr.1", "llama.cpp commit": "abc", "patches": "def",
        "CPU": "A CPU", "CPU features": "AVX2", "processors": "2", "system": "Linux",
        "context, tokens": "4,096", "flash attention": "on", "causal attention": "off",
        "backends": "CPU BLAS", "K cache": "f16", "LoRA adapters": "none",
        "tokens of a prefill step": "6", "positions of prefill": "0",
        "tokens of a decode step": "1", "positions of decode": "6 to 7",
    }  # fmt: skip
    assert {name: found[name] for name in known} == known
    assert found.keys() >= MODEL_FACTS
    assert "tokens of a decode step" not in dict(facts(session(tmp_path / "b.log"), []))


def test_the_differing_facts_have_both_values(tmp_path: Path) -> None:
    a = session(tmp_path / "a.log", with_threads(2))
    b = session(tmp_path / "b.log", with_threads(3))
    assert differing_facts(a, b, []) == [["threads", "2", "3"]]
    assert differing_facts(a, a, ["decode"]) == []
    report = compute_settings([a, b, b], [b, a], [])
    assert report.rows == [
        ["log", f"{a.path} and 2 more", f"{b.path} and 1 more"], ["threads", "2", "3"],
    ]  # fmt: skip
    assert report.notes == []
    alike = compute_settings([a], [a, b], [])
    assert (alike.rows, alike.notes) == ([], [f"A is {a.path}, B is {a.path} and 1 more.", ALIKE])
    assert [log_names(["x"] * n) for n in (1, 2)] == ["x", "x and 1 more"]


def test_a_side_is_named_whose_own_logs_differ(tmp_path: Path) -> None:
    """They are compared with its first log; each fact is named once."""

    def other_cpu(event: s.Event) -> None:
        with_threads(2)(event)
        if isinstance(event, s.SessionStart):
            event.host.cpu = "another"

    a = session(tmp_path / "a.log", with_threads(2))
    b = session(tmp_path / "b.log", with_threads(3))
    c = session(tmp_path / "c.log", other_cpu)
    assert unlike_notes([("A", [a]), ("B", []), ("C", [a, a])]) == []
    assert unlike_notes([("A", [b, b]), ("B", [a, b, b])]) == [
        "B: its logs differ in their settings: threads.",
    ]
    assert unlike_notes([("B", [a, b, c])]) == [
        "B: its logs differ in their settings: threads, CPU.",
    ]
    assert unlike_notes([("B", [a, c, a])]) == ["B: its logs differ in their settings: CPU."]


@pytest.mark.parametrize(
    ("leafs", "adapters"),
    [
        ([], "none"),
        ([("a.lora_a", [64, 8])], "on 1 weights, rank 8"),
        ([("a.lora_a", [64, 16]), ("b.lora_a", [64, 8]), ("c.lora_a", [64, 8]),
          ("c.lora_b", [8, 64])], "on 3 weights, rank 8, 16"),
        ([("a.lora_a", [64])], "none"),
    ],
)  # fmt: skip
def test_adapters_are_known_by_their_matrices(
    leafs: list[tuple[str, list[int]]], adapters: str, tmp_path: Path
) -> None:
    def change(event: s.Event) -> None:
        if isinstance(event, s.Graph):
            event.leafs += [s.Leaf(name=name, type="f32", ne=ne, bytes=4) for name, ne in leafs]

    found = dict(facts(session(tmp_path / "a.log", change), []))
    assert found["LoRA adapters"] == adapters


def test_without_nodes_adapters_are_not_recorded(tmp_path: Path) -> None:
    of = session(tmp_path / "a.log")
    of.graphs = {number: replace(graph, nodes=None) for number, graph in of.graphs.items()}
    assert dict(facts(of, []))["LoRA adapters"] == "not recorded"
