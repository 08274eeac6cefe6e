"""The settings that differ between two recorded sessions: pure facts, no times.

Invariant: every fact that affects the measurement is compared; equal ones are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import counted_steps
from llamacpp_instr.report.report import Column, Report

_CONTEXT = {
    "n_threads": "threads",
    "n_threads_batch": "threads of prefill",
    "n_ctx": "context, tokens",
    "n_batch": "batch, tokens",
    "n_ubatch": "ubatch, tokens",
    "n_seq_max": "sequences",
    "type_k": "K cache",
    "type_v": "V cache",
    "flash_attn": "flash attention",
    "kv_unified": "unified KV cache",
    "offload_kqv": "KV cache offloaded",
    "causal": "causal attention",
    "embeddings": "embeddings",
    "backends": "backends",
}
_MODEL = {
    "name": "model",
    "arch": "architecture",
    "ftype": "file type",
    "params": "parameters",
    "bytes": "weights, bytes",
}
MODEL_FACTS = frozenset(_MODEL.values())
"""the facts that identify the model, which a comparison of models is about"""
ALIKE = "Recorded alike: same model, build, host, level and settings."


def compute_settings(a: Sequence[Session], b: Sequence[Session], phases: Sequence[str]) -> Report:
    """The facts that differ between the first sessions of two sides, with their values in A and B;
    a note if there are none."""
    columns = [Column("setting"), Column("A"), Column("B")]
    differing = differing_facts(a[0], b[0], phases)
    logs = [log_names([session.path for session in side]) for side in (a, b)]
    if not differing:
        notes = [f"A is {logs[0]}, B is {logs[1]}.", ALIKE]
        return Report("", columns, [], notes, key="settings")
    rows = [["log", *logs], *differing]
    return Report("", columns, [list(row) for row in rows], key="settings")


def differing_facts(a: Session, b: Session, phases: Sequence[str]) -> list[list[str]]:
    """[fact, value in A, value in B] of every fact that differs."""
    of_a, of_b = (dict(facts(session, phases)) for session in (a, b))
    return [[what, of_a[what], of_b[what]] for what in of_a if of_a[what] != of_b[what]]


def log_names(paths: Sequence[str]) -> str:
    """The logs of a side: `a.log and 2 more`."""
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def unlike_notes(sides: Sequence[tuple[str, Sequence[Session]]]) -> list[str]:
    """A sentence for each side of a comparison, by its name, whose own logs differ in settings."""
    notes = []
    for name, sessions in sides:
        rows = (differing_facts(sessions[0], other, []) for other in sessions[1:])
        if found := dict.fromkeys(fact for of in rows for fact, _, _ in of):
            notes.append(f"{name}: its logs were recorded differently: {', '.join(found)}.")
    return notes


def facts(session: Session, phases: Sequence[str]) -> Iterator[tuple[str, str]]:
    """[fact, value] of everything that affects a measurement, and the ranges of `phases`."""
    start = session.start
    yield "level", start.level
    yield "earlier fork's dialect", str(start.args.get("dialect", "no"))
    for key, what in _MODEL.items():
        yield what, _values(session.models.values(), key)
    yield "llama-cpp-python", start.producer.llama_cpp
    yield "llama.cpp commit", start.producer.commit
    yield "patches", start.producer.patches
    yield "CPU", start.host.cpu
    yield "CPU features", " ".join(start.host.features)
    yield "processors", str(start.host.cores)
    yield "system", start.host.os
    yield "clock", start.clock
    for key, what in _CONTEXT.items():
        yield what, _values(session.contexts.values(), key)
    yield "LoRA adapters", _adapters(session)
    steps, _ = counted_steps(session)
    for phase in phases:
        of_phase = steps.rows(steps["phase"] == phase)
        yield f"tokens of a {phase} step", _range(of_phase["n_tokens"])
        yield f"positions of {phase}", _range(of_phase["pos"])


def _values(owners: Any, key: str) -> str:
    """The distinct values of a session, in order."""
    return ", ".join(dict.fromkeys(_word(getattr(owner, key)) for owner in owners))


def _adapters(session: Session) -> str:
    """The graphs show what adapters add: products with matrices of their own."""
    computed = {graph: session.graphs[graph] for graph in session.computes["graph"].tolist()}
    ranks = {
        leaf.name: leaf.ne[1]
        for graph in computed.values()
        for leaf in graph.leafs
        if leaf.name.endswith(".lora_a") and len(leaf.ne) > 1
    }
    if not any(graph.nodes for graph in computed.values()):
        return "not recorded"
    if not ranks:
        return "none"
    return f"on {len(ranks)} weights, rank {', '.join(map(str, sorted(set(ranks.values()))))}"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _range(numbers: Any) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return str(low) if low == high else f"{low} to {high}"
