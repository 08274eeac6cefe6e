"""A trace of some steps has what these steps recorded, and nothing of the session around them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from llamacpp_instr.converters.exports.perfetto import Options
from llamacpp_instr.log.graph.timeline import Selection
from tests.exports import test_chrome as chrome
from tests.exports.test_perfetto import Back, convert

LOG = Path(__file__).parent.parent / "fixtures" / "every-event.log"
"""one event of each kind, of which one step"""
AROUND = {"model", "mark", "request", "wait", "note", "message"}
"""categories of slices that belong to no step"""
COUNTED_AROUND = {
    "waiting for a CPU", "load", "resident memory",
    *(f"{buffer} {kind}" for buffer in ("CPU", "CPU_Mapped") for kind in ("model", "context",
                                                                          "compute")),
}  # fmt: skip
ONE_STEP = pytest.mark.parametrize("steps", [(0, 0), (0, 9)])


@ONE_STEP
def test_of_perfetto_s(steps: tuple[int, int], tmp_path: Path) -> None:
    whole, part = (
        Back(convert(tmp_path / "a.log", LOG.read_bytes(), Options(Selection(steps=of)))[0])
        for of in (None, steps)
    )
    drawn, selected = (Counter(c["category"] for c in back.slices) for back in (whole, part))
    assert {category: drawn.pop(category) for category in AROUND} == dict.fromkeys(AROUND, 1)
    assert selected == drawn
    drawn, selected = (Counter(name for name, *_ in back.counters) for back in (whole, part))
    assert set(drawn) >= COUNTED_AROUND
    assert selected == Counter({k: n for k, n in drawn.items() if k not in COUNTED_AROUND})


@ONE_STEP
def test_of_chrome_s(steps: tuple[int, int], tmp_path: Path) -> None:
    whole, part = (
        chrome.convert(tmp_path / "a.log", LOG.read_bytes(), selection=Selection(steps=of))
        for of in (None, steps)
    )
    drawn, selected = (Counter(e["cat"] for e in events if "cat" in e) for events in (whole, part))
    around = AROUND - {"note", "message"}  # instants have no category
    assert {category: drawn.pop(category) for category in around} == dict.fromkeys(around, 1)
    assert selected == drawn
    for phase, outside in (("C", lambda name: name.startswith("memory ")), ("i", lambda _: True)):
        drawn, selected = (
            Counter(e["name"] for e in events if e["ph"] == phase) for events in (whole, part)
        )
        assert any(map(outside, drawn))
        assert selected == Counter({name: n for name, n in drawn.items() if not outside(name)})
