"""Sessions on devices, and what their logs must have, whichever the device is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import read_events
from tests.kit.native_kit import ROOT

Event = dict[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True)
class DeviceSession:
    """A session that `tests/programs/device_session.py` recorded."""

    log: Path
    equal: bool | None
    """whether the logits were those without a session"""
    devices: dict[str, str]
    """name -> description, as ggml reports it"""
    memory: dict[str, tuple[int, int]]
    """name -> total and free bytes, as ggml reports them"""
    messages: list[str]
    """that llama.cpp logged"""
    stderr: str = ""
    """of the program"""

    def events(self, name: str | None = None) -> list[Event]:
        return read_events(self.log, name)


def record_on(
    modules: Sequence[Path], log: Path, model: Path, *, level: str = "detailed", layers: int = -1,
    contexts: int = 1, environment: Mapping[str, str] | None = None,
) -> DeviceSession:  # fmt: skip
    """Record a session with these backends."""
    env = {**os.environ, "GGML_BACKEND_PATH": ":".join(map(str, modules)), **(environment or {})}
    words = [model, log, level, layers, contexts]
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.device_session", *map(str, words)],
        cwd=ROOT, env=env, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return DeviceSession(log, **json.loads(done.stdout), stderr=done.stderr)


@dataclass(frozen=True)
class Kernels:
    """An `ops` line with what it refers to."""

    line: Event
    compute: Event
    graph: Event
    nodes: list[int]
    """that are executed"""
    firsts: list[int]
    """the first node of each kernel"""

    @property
    def spans(self) -> list[Span]:
        """When each kernel began and ended."""
        return spans_of(self.line)

    @property
    def span(self) -> Span:
        return self.spans[0][0], self.spans[-1][1]

    @property
    def busy(self) -> int:
        return sum(self.line["dur"])


def spans_of(event: Event) -> list[Span]:
    """The intervals of an event with the columns `gap` and `dur`."""
    found, at = [], event["t"]
    for gap, dur in zip(event.get("gap") or [0] * len(event["dur"]), event["dur"], strict=True):
        found.append((at + gap, at + gap + dur))
        at += gap + dur
    return found


def splits_of(events: Sequence[Event]) -> dict[tuple[int, int], Span]:
    """By compute and split: when its submission, or its computation, began and ended."""
    return {
        (event["compute"], split): span
        for event in events
        if event["event"] == "splits"
        for split, span in zip(event["split"], spans_of(event), strict=True)
    }


def kernels_of(events: Sequence[Event]) -> Iterator[Kernels]:
    """The kernels of the devices and of the first thread, with their computes."""
    graphs: dict[int, Event] = {}
    plans: dict[int, Event] = {}
    computes: dict[int, Event] = {}
    for event in events:
        match event["event"]:
            case "graph":
                graphs[event["graph"]] = event
            case "plan":
                plans[event["plan"]] = event
            case "compute":
                computes[event["compute"]] = event
            case "ops" if event.get("thread", 0) == 0:
                plan, compute = plans[event["plan"]], computes[event["compute"]]
                graph = graphs[compute["graph"]]
                assert plan["graph"] == compute["graph"]
                counts = plan.get("n") or [1] * len(plan["node"])
                assert len(event["dur"]) == len(counts) == len(event.get("gap", counts))
                runs = graph["nodes"]["exec"]
                nodes = [
                    i
                    for node, n in zip(plan["node"], counts, strict=True)
                    for i in range(node, node + n)
                    if runs[i]
                ]
                yield Kernels(event, compute, graph, nodes, plan["node"])


def check_coverage(events: Sequence[Event]) -> Counter[str]:
    """Asserts that each executed node of each compute is in exactly one kernel, and those of a
    device in its split; a device passes over nodes without elements. Returns the number of nodes of
    each device; those of the first thread are `""`."""
    found: Counter[str] = Counter()
    seen: dict[int, Counter[int]] = {}
    for kernels in kernels_of(events):
        device = kernels.line.get("device", "")
        found[device] += len(kernels.nodes)
        seen.setdefault(kernels.compute["compute"], Counter()).update(kernels.nodes)
        if device:
            split = kernels.graph["splits"][kernels.line["split"]]
            assert split["backend"] == device
            assert all(split["start"] <= node < split["end"] for node in kernels.nodes)
    graphs = {event["graph"]: event for event in events if event["event"] == "graph"}
    for event in events:
        if event["event"] == "compute":
            nodes, splits = (graphs[event["graph"]][key] for key in ("nodes", "splits"))
            there = seen[event["compute"]]
            empty = {
                i
                for split in splits
                if split["backend"] != "CPU"
                for i in range(split["start"], split["end"])
                if nodes["bytes"][i] == 0 and i not in there
            }
            runs = {i for i, is_run in enumerate(nodes["exec"]) if is_run}
            assert there == Counter(runs - empty)
    return found


def check_times(events: list[Event], least: float = 0.7) -> None:
    """Kernels run one after the other, after their submission has begun and before the wait for
    them has ended. They take at least the share `least` of the time from the first to the last,
    which is small for models whose kernels are as short as the time between two."""
    splits = splits_of(events)
    waits = [(of["t"], of["t"] + of["dur"]) for of in events if of["event"] == "sync"]
    uncertainty = max(event["uncertainty"] for event in events if event["event"] == "device")
    busy = whole = 0
    for kernels in kernels_of(events):
        if "device" not in kernels.line:
            continue
        submitted, _ = splits[kernels.compute["compute"], kernels.line["split"]]
        computed = kernels.compute["t"] + kernels.compute.get("start", 0) + kernels.compute["dur"]
        begin, end = kernels.span
        assert begin >= submitted - uncertainty
        assert end <= next(until for at, until in waits if at >= computed) + uncertainty
        busy, whole = busy + kernels.busy, whole + end - begin
    assert busy > least * whole
