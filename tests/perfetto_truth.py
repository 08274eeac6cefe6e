"""What a trace of a log has to say, worked out from the log's JSON in the plainest way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

Row = tuple[Any, ...]


@dataclass
class Truth:
    """Sorted rows of (begin, duration, ...)."""

    steps: list[Row] = field(default_factory=list)
    layers: list[Row] = field(default_factory=list)
    ops: list[Row] = field(default_factory=list)
    """and name, tensor, bytes of the result's type and shape"""
    threads: list[Row] = field(default_factory=list)
    """thread, begin, duration, name, time inside barriers"""
    gaps: Counter[int] = field(default_factory=Counter)
    """by thread: time between its kernels and after them"""
    tokens: list[Row] = field(default_factory=list)
    kv: list[Row] = field(default_factory=list)
    faults: list[Row] = field(default_factory=list)
    rates: list[Row] = field(default_factory=list)
    n_edges: int = 0
    """reads of another kernel's result, all computes together"""
    n_taken: int = 0
    """tokens that a decode took"""


def truth(events: list[dict[str, Any]]) -> Truth:
    """Goes through the events once, in their order."""
    found = Truth()
    graphs: dict[int, Any] = {}
    plans: dict[int, Any] = {}
    begun: dict[int, Any] = {}
    sampled: Counter[int] = Counter()
    for e in events:
        kind = e["event"]
        if kind == "graph":
            graphs[e["graph"]] = e
        elif kind == "plan":
            plans[e["plan"]] = e
        elif kind == "step_begin":
            begun[e["step"]] = e
            if e["phase"] == "decode" and e.get("pos", -1) != 0:
                found.n_taken += min(sampled[e["ctx"]], e["n_tokens"])
            sampled[e["ctx"]] = 0
        elif kind == "step_end":
            b = begun[e["step"]]
            name = "encode" if b["kind"] == "encode" else b["phase"]
            dur = e["t"] - b["t"]
            found.steps.append((b["t"], dur, name, b["step"], b["n_tokens"], e["status"]))
            found.faults.append((b["t"], e.get("minflt", 0)))
            if dur:
                found.rates.append((b["t"], b["n_tokens"] / (dur / 1e9)))
        elif kind == "token":
            p = e.get("p")
            found.tokens.append((e["t"], e["dur"], e["text"], e["id"], p))
            sampled[e["ctx"]] += 1
        elif kind == "kv":
            found.kv.append((e["t"], e["used"]))
        elif kind == "layers":
            for begin, dur, layer in intervals(e, e["layer"]):
                name = f"layer {layer}" if layer >= 0 else "no layer"
                found.layers.append((begin, dur, name))
        elif kind == "ops":
            plan = plans[e["plan"]]
            nodes = graphs[plan["graph"]]["nodes"]
            counts = plan.get("n") or [1] * len(plan["node"])
            insides = [
                [i for i in range(first, first + n) if nodes["exec"][i]]
                for first, n in zip(plan["node"], counts, strict=True)
            ]
            names = ["+".join(nodes["op"][i] for i in inside) for inside in insides]
            waits = e.get("wait") or [None] * len(names)
            rows = list(intervals(e, zip(names, insides, waits, strict=True)))
            if e.get("thread", 0) == 0:
                for begin, dur, (name, inside, _) in rows:
                    last = inside[-1]
                    shape = f"{nodes['type'][last]} {nodes['ne'][last]}"
                    found.ops.append((begin, dur, name, nodes["name"][last], shape))
                found.n_edges += count_edges(nodes, insides)
            if "wait" in e:
                thread = e.get("thread", 0)
                for begin, dur, (name, _, wait) in rows:
                    found.threads.append((thread, begin, dur, name, wait))
                if "gap" in e:
                    found.gaps[thread] += sum(e["gap"][1:]) + e.get("tail", 0)
    for column in ("steps", "layers", "ops", "threads", "tokens", "kv", "faults", "rates"):
        getattr(found, column).sort(key=lambda row: tuple(map(str, row)))
    return found


def intervals(event: dict[str, Any], beside: Any) -> Any:
    """(begin, duration, what stands beside) of an event's `gap` and `dur`."""
    now = event["t"]
    gaps = event.get("gap") or [0] * len(event["dur"])
    for gap, dur, what in zip(gaps, event["dur"], beside, strict=True):
        yield now + gap, dur, what
        now += gap + dur


def count_edges(nodes: dict[str, Any], insides: list[list[int]]) -> int:
    """Pairs of kernels of which the later one reads what the earlier one made."""
    maker = {node: i for i, inside in enumerate(insides) for node in inside}
    pairs = set()
    for i, inside in enumerate(insides):
        for node in inside:
            for source in nodes["src"][node]:
                while source >= 0 and not nodes["exec"][source]:
                    source = nodes["src"][source][0] if nodes["src"][source] else -1
                if source in maker and maker[source] < i:
                    pairs.add((maker[source], i))
    return len(pairs)
