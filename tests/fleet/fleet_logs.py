"""Logs of other sessions, made of a recorded one: other ids, hosts, builds, and slower kernels."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from tests.kit.native_kit import ROOT

RECORDED = ROOT / "tests" / "fixtures" / "demo-verbose.log"


def write_log(
    path: Path,
    number: int,
    *,
    slower: float = 1.0,
    build: str = "",
    cpu: str = "",
    time: str = "",
    repeat: int = 1,
) -> Path:
    """The recorded session with another id. `slower` stretches steps and kernels, `repeat` appends
    its decodes again."""
    events = [orjson.loads(line) for line in RECORDED.read_bytes().splitlines()]
    start = events[0]
    start["id"] = f"{number:016x}"
    if build:
        start["producer"]["llama_cpp"] = build
    if cpu:
        start["host"]["cpu"] = cpu
    if time:
        start["time"] = time
        start["wall"] = int(datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()) * 10**9
    begin = start["t"]
    for event in events:
        event["t"] = begin + round((event["t"] - begin) * slower)
        if event["event"] == "ops":
            for column in ("dur", "gap", "wait"):
                if column in event:
                    event[column] = [round(ns * slower) for ns in event[column]]
    written = events if repeat == 1 else [*events[:-1], *_again(events, repeat - 1)]
    path.write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in written))
    return path


def write_logs(folder: Path, n: int) -> Path:
    """A new folder with `n` logs: 0.log, 1.log and so on."""
    folder.mkdir()
    for i in range(n):
        write_log(folder / f"{i}.log", i)
    return folder


def _again(events: list[dict[str, Any]], times: int) -> list[dict[str, Any]]:
    """The decodes once more, `times` times, with new numbers."""
    decodes = [of for of in events if of.get("step", -1) > 1 or of.get("compute", -1) > 1]
    steps = 1 + max(of["step"] for of in events if "step" in of)
    computes = 1 + max(of["compute"] for of in events if "compute" in of)
    span = events[-1]["t"] - events[0]["t"]
    found = []
    for i in range(1, times + 1):
        for event in decodes:
            moved = dict(event, t=event["t"] + i * span)
            for name, n in (("step", steps), ("compute", computes)):
                if moved.get(name, -1) >= 0:
                    moved[name] += i * n
            found.append(moved)
    return found
