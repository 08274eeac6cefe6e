"""The trace of a session has the figures of its summary, by Perfetto's trace_processor."""

from __future__ import annotations

import numpy as np
import pytest

from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto
from llamacpp_instr.converters.exports.tables import load_tables
from llamacpp_instr.log.reader import read_events
from tests.analyses.test_figures_agree import counted, flat, session, summary, summed
from tests.kit.perfetto_queries import NAME, OP, arg, slices
from tests.kit.reported import Reported, Row
from tests.kit.trace_processor import ask

__all__ = ["counted", "flat", "session", "summary"]  # fixtures

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def summarized(session: Reported) -> dict[str, Row]:
    return session.reports("summary", session.log)


def test_the_trace(session: Reported, counted: set[int], summary: dict[str, list[Row]]) -> None:
    trace = session.log.with_suffix(".pftrace")
    with trace.open("wb") as file:
        write_perfetto(read_events(session.log), file, Options())
    numbers = ", ".join(map(str, counted))
    inside = (
        f"exists (select 1 from slice b where b.category = 'step' and b.ts <= s.ts"
        f" and s.ts < b.ts + b.dur and {arg('step', 'b')} in ({numbers}))"
    )
    steps, ops, layers = ask(
        trace,
        slices("s.name, s.dur", f"s.category = 'step' and {arg('step')} in ({numbers})"),
        slices(
            f"{NAME}, sum(s.dur), count(*), sum({arg('flops')}), sum({arg('bytes')})",
            f"{OP} and {inside}",
        )
        + " group by 1",
        slices("sum(s.dur)", f"s.name glob 'layer [0-9]*' and {inside}"),
    )
    for row in summary["Speed"]:
        durations = [dur for name, dur in steps if name == row["Phase"]]
        assert (len(durations), sum(durations)) == (row["steps"], row["time"])
        if row["Phase"] == "decode":
            assert row["tokens/s median"] == pytest.approx(
                float(np.median(1e9 / np.array(durations)))
            )
    spent = summed((row["Op"].partition(" ")[0], row["time"]) for row in summary["Top ops"])
    calls = summed((row["Op"].partition(" ")[0], row["calls"]) for row in summary["Top ops"])
    assert {name: (ns, n) for name, ns, n, _, _ in ops} == {
        name: (spent[name], calls[name]) for name in spent
    }
    table = load_tables(session.log).ops
    table = table[table.step.isin(counted)].groupby("op", observed=True)[["flops", "bytes"]].sum()
    assert {name: (n_flops or 0, n_bytes or 0) for name, _, _, n_flops, n_bytes in ops} == {
        name: (row.flops, row.bytes) for name, row in table.iterrows()
    }
    of_layers = [row for row in summary["Layers"] if row["Layer"] >= 0]
    assert layers == [[sum(row["prefill"] + row["decode"] for row in of_layers)]]
