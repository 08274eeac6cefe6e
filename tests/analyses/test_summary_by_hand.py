"""Sections of the summary, of logs whose figures are written by hand, and the tables of a
probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses import summary
from llamacpp_instr.converters.analyses.probe import busy_note, probe_reports, roofline
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.log import schema as s
from llamacpp_instr.prediction.probe.file import Bandwidth, Kernel
from llamacpp_instr.report.report import Report
from tests.kit.made_probe import MIB, probe_of
from tests.kit.reports import by_title, rows, session_of
from tests.kit.sketched_log import Sketch


def sections(tmp_path: Path, events: list[s.Event]) -> dict[str, Report]:
    return by_title(compute_summary(session_of(tmp_path / "a.log", events)))


def decoding(n: int = 3) -> Sketch:
    sketch = Sketch()
    sketch.step(9000, 6, sampled=10, ops=([4000, 500], [0, 0]))
    for _ in range(n):
        sketch.step(1000, sampled=10, ops=([600, 30], [0, 0]))
    return sketch


@pytest.mark.parametrize(
    ("n", "words"),
    [(0, ""), (1, "1 parameters"), (99_999, "99,999 parameters"), (100_000, "0.1M parameters"),
     (999_900_000, "999.9M parameters"), (10**9, "1.00B parameters")],
)  # fmt: skip
def test_parameters_in_words(n: int, words: str) -> None:
    assert summary._parameters(n) == words


def test_the_facts_of_a_session(tmp_path: Path) -> None:
    sketch = decoding()
    for event in sketch.events:
        if isinstance(event, s.Context):
            event.n_threads, event.n_threads_batch = 1, 4
        if isinstance(event, s.Model):
            event.path = "/a/b/c.gguf"
    found = sections(tmp_path, sketch.events)["Session"]
    facts = dict(found.rows)
    assert facts["model"] == "c.gguf, llama, F16, 1.0M parameters"
    assert facts["machine"] == "A CPU, 1 thread and 4 threads"
    assert facts["recorded"] == "2025-06-01T12:00:00.000Z, level verbose"
    assert "flash attention" not in facts
    assert found.figures == {"threads": (4, "count"), "parameters": (1_000_000, "count")}
    assert not any("--stats" in note for note in found.notes)
    sketch.events[0] = replace(sketch.events[0], perturbed=True)
    notes = sections(tmp_path, sketch.events)["Session"].notes
    assert "Tensor values were read (--stats): do not compare times." in notes


@pytest.mark.parametrize(
    ("tick", "shown"), [(0.0, ""), (1.0, ""), (1e9 / 24e6, "41.7 ns"), (1e9 / 19.2e6, "52.1 ns")]
)
def test_a_coarse_clock_is_mentioned(tick: float, shown: str, tmp_path: Path) -> None:
    events = decoding().events
    events[0] = replace(events[0], clock="cntvct", tick=tick)
    notes = sections(tmp_path, events)["Session"].notes
    coarse = [note for note in notes if note.startswith("Single times are multiples of")]
    assert len(coarse) == (shown != "")
    assert shown in "".join(coarse)


@pytest.mark.parametrize(("n", "there"), [(1, False), (2, True)])
def test_faults_of_the_first_step_need_a_second(n: int, there: bool, tmp_path: Path) -> None:
    sketch = Sketch()
    for i in range(n):
        sketch.step(1000, 4, faults=7 + i)
    figures = sections(tmp_path, sketch.events)["Speed"].figures
    assert ("minor faults of the first step" in figures) == there
    if there:
        assert figures["minor faults of the first step"] == (7, "count")
        assert figures["faults of later steps, mean"] == (8, "number")


def test_a_cache_s_fullest_moment_counts_the_bytes_of_all_caches(tmp_path: Path) -> None:
    """Among equal bytes, the most cells count; the only cache of a context has no number."""
    sketch = decoding()
    for cache, n_bytes, used in ((0, 100, 1), (1, 50, 2), (0, 90, 9), (1, 60, 3), (1, 60, 2)):
        sketch.events.append(s.Kv(t=sketch.t, ctx=0, op="clear", cache=cache, used=used,
            size=512 * (cache + 1), bytes=n_bytes))  # fmt: skip
    sketch.events.append(s.Memory(t=sketch.t, ctx=0, buffers=[s.BufferUse(buffer="CPU")]))
    memory = sections(tmp_path, sketch.events)["Memory"]
    assert memory.figures == {
        "bytes used of context 0": (150, "bytes"),
        "cells used of context 0, cache 0": (9, "count"),
        "cells of context 0, cache 0": (512, "count"),
        "cells used of context 0, cache 1": (3, "count"),
        "cells of context 0, cache 1": (1024, "count"),
    }
    (note,) = memory.notes
    assert note.startswith("Context 0 used at most 9 of 512 cells and 3 of 1,024 cells (150 ")


def test_an_empty_cache_is_reported(tmp_path: Path) -> None:
    sketch = decoding()
    sketch.events.append(s.Kv(t=sketch.t, ctx=0, op="clear", used=0, size=512))
    sketch.events.append(s.Memory(t=sketch.t, ctx=0, buffers=[s.BufferUse(buffer="CPU")]))
    figures = sections(tmp_path, sketch.events)["Memory"].figures
    assert figures["cells used of context 0"] == (0, "count")
    assert figures["cells of context 0"] == (512, "count")


@pytest.mark.parametrize(
    ("decode_ns", "overhead", "share"), [(0, 5, 0.0), (1000, 5, 0.005), (1, 1, 1.0)]
)
def test_the_overhead_is_a_share_of_the_time_in_decode(
    decode_ns: int, overhead: int, share: float, tmp_path: Path
) -> None:
    sketch = decoding()
    end = s.SessionEnd(t=sketch.t, reason="closed", events={"a": 2, "b": 3}, bytes=9, dropped=1,
                       dropped_ops=2, decode_ns=decode_ns, overhead_ns=overhead)  # fmt: skip
    recorder = sections(tmp_path, [*sketch.events, end])["Recorder"]
    assert recorder.figures["overhead, of decode"] == (share, "fraction")
    assert recorder.figures["events"] == (6, "count")
    assert f" {100 * share:.2f} % of the time in decode" in recorder.notes[0]
    assert "It dropped 1 event and 2 ops." in recorder.notes[0]
    assert len(recorder.notes) == 1


def test_the_marks_of_instr_run_are_not_the_application_s(tmp_path: Path) -> None:
    names = ["warm-up", "run 1", "run 12", "run", "run 1 more", "my warm-up"]
    sketch = decoding()
    for number, name in enumerate(names):
        sketch.events.append(s.Mark(t=sketch.t, mark=number, name=name, phase="instant"))
    marks = sections(tmp_path, sketch.events)["Marks"]
    assert [row[0] for row in marks.rows] == names[3:]
    only = [e for e in sketch.events if not isinstance(e, s.Mark) or e.name in names[:3]]
    assert "Marks" not in sections(tmp_path, only)


@pytest.mark.parametrize(("most", "message"), [(1, "Not shown: 1 other op, 5.1 % of"), (2, None)])
def test_ops_that_are_not_shown_are_counted(
    most: int, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The additions take 590 of the 6,390 ns in kernels."""
    monkeypatch.setattr(summary, "TOP_OPS", most)
    top = sections(tmp_path, decoding().events)["Top ops"]
    assert len(top.rows) == most
    share = 590 / (590 + 4000 + 1800)
    wanted = f"Not shown: 1 other op, {100 * share:.1f} % of the time."
    assert [note for note in top.notes if note.startswith("Not shown")] == (
        [wanted] if message else []
    )
    assert ("share of other ops" in top.figures) == (message is not None)


# --- under the roofs ---

FLOPS, MOVED = 2 * 4 * 8, 64 + 16 + 32
"""of the product of a sketch"""


def under(tmp_path: Path, sketch: Sketch, **of: Any) -> tuple[list[Report], Any]:
    probe = replace(probe_of("A CPU"), **{
        "bandwidth": [Bandwidth(1, MIB, 2e8)],
        "kernels": [Kernel("F16", 1, 1, 2e8), Kernel("Q8_0", 1, 1, 4e8)],
        **of,
    })  # fmt: skip
    return roofline(session_of(tmp_path / "a.log", sketch.events), probe)


@pytest.mark.parametrize(
    ("flops", "limit", "attainable", "reached"),
    [
        # at the roof of memory, 64 FLOPs of 112 bytes give 114 million a second
        (2e8, "memory", 2e8 * FLOPS / MOVED, MOVED / 600e-9 / 2e8),
        (1e8, "compute", 1e8, FLOPS / 600e-9 / 1e8),
    ],
)
def test_an_op_is_under_the_lower_roof(
    flops: float, limit: str, attainable: float, reached: float, tmp_path: Path
) -> None:
    kernels = [Kernel("F16", 1, 1, flops), Kernel("Q8_0", 1, 1, 4e8)]
    reports, _ = under(tmp_path, decoding(), kernels=kernels)
    assert [of.title for of in reports] == ["Under the roofs: prefill", "Under the roofs: decode"]
    product, addition = rows(reports[1])
    assert (product["time"], addition["time"]) == (1800, 90)
    assert product["share"] == pytest.approx(1800 / 1890)
    assert product["FLOP/s"] == pytest.approx(FLOPS / 600e-9)
    assert product["bytes/s"] == pytest.approx(MOVED / 600e-9)
    assert product["FLOP/byte"] == pytest.approx(FLOPS / MOVED)
    assert product["limit"] == limit
    assert product["attainable"] == pytest.approx(attainable)
    assert product["reached"] == pytest.approx(reached)
    # no kernel of its type was measured, so it is under the fastest
    assert addition["limit"] == "memory"
    assert addition["attainable"] == pytest.approx(2e8 * addition["FLOP/byte"])


def test_other_threads_and_unknown_steps_are_not_under_the_roofs(tmp_path: Path) -> None:
    sketch = decoding()
    other = s.Ops(t=sketch.t, compute=3, plan=0, thread=1, dur=[9999, 9999], wait=[0, 0])
    sketch.events.insert(-2, other)
    assert rows(under(tmp_path, sketch)[0][1])[0]["time"] == 1800
    end = sketch.events[-2]
    assert isinstance(end, s.StepEnd)
    end.status = 1
    assert rows(under(tmp_path, sketch)[0][1])[0]["time"] == 1200


def test_a_probe_of_another_machine_has_no_roofs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="recorded on A CPU, but the probe is of another;"):
        under(tmp_path, decoding(), cpu="another")
    assert under(tmp_path, decoding(), cpu="")[0]
    sketch = Sketch()
    sketch.step(1000, 4)
    with pytest.raises(UsageError, match="no ops; record with --level detailed"):
        under(tmp_path, sketch)


# --- a probe ---


def test_a_probe_has_a_column_for_each_number_of_threads() -> None:
    memory, kernels, barriers = probe_reports(probe_of("A CPU"))
    assert [column.name for column in memory.columns] == ["working set", "1 thread", "2 threads"]
    assert memory.rows == [[MIB, 9e10, 15e10], [64 * MIB, None, 2e10]]
    assert kernels.rows == [["F16, 1", 5e10, 1e11], ["F16, 8", None, 3e11]]
    assert barriers.rows == [["time", 250.0]]
    assert memory.notes == ["Bytes read and written per second, on A CPU."]
    (unnamed, *_) = probe_reports(probe_of())
    assert unnamed.notes == ["Bytes read and written per second, on this machine."]


@pytest.mark.parametrize(
    ("load", "left_out", "begins"),
    [(0.0, 0, None), (2.0, 0, None), (2.1, 0, "The machine was busy (load 2.1 on 4 CPUs)"),
     (0.0, 1, "1 figures were left out"), (9.0, 3, "3 figures were left out")],
)  # fmt: skip
def test_a_busy_machine_is_reported(load: float, left_out: int, begins: str | None) -> None:
    probe = replace(probe_of("A CPU"), load=load, left_out=left_out)
    note = busy_note(probe)
    assert (note is None) == (begins is None)
    assert (note or "").startswith(begins or "")
    assert (note in probe_reports(probe)[0].notes) == (note is not None)
