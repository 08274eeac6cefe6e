"""Kernels of devices in traces: where the log has them, inside the run of their split, with an
arrow from its submission."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from llamacpp_instr.converters.exports.chrome import write_chrome
from llamacpp_instr.converters.exports.torch import write_torch
from llamacpp_instr.log.reader import read_events
from tests.kit.device_log import with_devices
from tests.kit.made_log import encode, make_log

FIXTURES = Path(__file__).parent.parent / "fixtures"
LOGS = ["devices.log", "vulkan-timed.log.gz"]


def lines(log: Path) -> list[dict[str, Any]]:
    data = log.read_bytes()
    text = gzip.decompress(data) if log.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines()]


def device_spans(log: Path) -> Counter[tuple[int, int]]:
    """Start and duration of each kernel of a device, from the lines alone."""
    found: Counter[tuple[int, int]] = Counter()
    for e in lines(log):
        if e["event"] == "ops" and e.get("device"):
            now = e["t"]
            for gap, dur in zip(e.get("gap") or [0] * len(e["dur"]), e["dur"], strict=True):
                found[now + gap, dur] += 1
                now += gap + dur
    return found


def n_runs(log: Path) -> int:
    return sum(1 for e in lines(log) if e["event"] == "ops" and e.get("device"))


@pytest.fixture
def overlapping(tmp_path: Path) -> Path:
    """A log in which runs of one device overlap."""
    events = make_log(Random(5).randint, n_contexts=2, level="detailed")
    log = tmp_path / "overlapping.log"
    log.write_bytes(encode(with_devices(events, Random(1))))
    assert n_runs(log) > 4
    return log


def logs(overlapping: Path) -> list[Path]:
    return [*(FIXTURES / name for name in LOGS), overlapping]


def test_chrome_has_them_too(overlapping: Path) -> None:
    for log in logs(overlapping):
        written = io.BytesIO()
        write_chrome(read_events(log), written)
        trace = json.loads(written.getvalue())
        events, start = trace["traceEvents"], trace["otherData"]["t0_monotonic_ns"]
        names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        backends = {e["device"] for e in lines(log) if e.get("device")}
        of_devices = [e for e in events if e["ph"] == "X" and names[e["tid"]] in backends]
        not_ops = {"run", "layer"}
        kernels = Counter(
            (start + round(e["ts"] * 1000), round(e["dur"] * 1000))
            for e in of_devices
            if e["cat"] not in not_ops and "op" in e["args"]
        )
        assert kernels == device_spans(log)
        assert sum(e["cat"] == "run" for e in of_devices) == n_runs(log)
        begins, ends = ({e["id"] for e in events if e["ph"] == ph} for ph in "sf")
        assert begins == ends
        if log is not overlapping:
            assert len(begins) == n_runs(log)


def test_torch_has_them_on_a_device_of_their_own(overlapping: Path, tmp_path: Path) -> None:
    """They launch where their split was submitted, in streams whose kernels do not overlap."""
    for i, log in enumerate(logs(overlapping)):
        folder = tmp_path / str(i)
        folder.mkdir()
        write_torch(read_events(log), folder)
        (path,) = folder.glob("*.json.gz")
        trace = json.loads(gzip.decompress(path.read_bytes()))
        names = {of["id"]: of["name"].partition(":")[0] for of in trace["deviceProperties"]}
        # TensorBoard's plugin divides by the size of a device's memory
        assert all(of.get("totalGlobalMem") != 0 for of in trace["deviceProperties"])
        kernels = [of for of in trace["traceEvents"] if of.get("cat") == "kernel" and of["pid"]]
        start = lines(log)[0]["t"]
        assert Counter(
            (start + round(of["ts"] * 1000), round(of["dur"] * 1000)) for of in kernels
        ) == device_spans(log)
        assert {names[of["args"]["device"]] for of in kernels} == {
            of["device"] for of in lines(log) if of["event"] == "ops" and of.get("device")
        }
        launches = {
            of["args"]["correlation"]: of
            for of in trace["traceEvents"]
            if of.get("cat") == "Runtime"
        }
        assert all(launches[of["args"]["correlation"]]["pid"] != of["pid"] for of in kernels)
        streams: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for of in kernels:
            begin = round(of["ts"] * 1000)
            key = of["pid"], of["tid"]
            streams.setdefault(key, []).append((begin, begin + round(of["dur"] * 1000)))
        for spans in streams.values():
            assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(spans)))
