"""Counters of a device in Perfetto's trace_processor, against the application's clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.log.reader import read_events
from tests.analyses.test_devices import CLOSE, LOG, _clock
from tests.kit.perfetto_queries import counters
from tests.kit.trace_processor import ask


@pytest.mark.native
def test_the_counters_of_perfetto_are_those_of_the_clock(tmp_path: Path) -> None:
    _, steps = _clock()
    trace = tmp_path / "vulkan.pftrace"
    with trace.open("wb") as file:
        write_perfetto(read_events(LOG), file, Options())
    rates, achieved = ask(
        trace,
        counters("c.value", "t.name = 'tokens/s' and c.value <> 0 order by c.ts"),
        counters("count(*)", "t.name glob 'achieved*'"),
    )
    assert [rate for (rate,) in rates] == pytest.approx(steps, rel=CLOSE)
    assert achieved == [[0]]
