"""A real session of an asynchronous device, against the clock of the application that used it.

`tests/fixtures/vulkan.log.gz` was recorded as docs/explanation/devices.md describes: a prompt of
four tokens, and 16 tokens sampled. Its note has the times at which the application began and
had each token.
"""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.converters.analyses.findings import Facts, find_causes
from llamacpp_instr.converters.analyses.stats import compute_stats
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.converters.analyses.tree import build_tree
from llamacpp_instr.converters.exports.chrome import write_chrome
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.schema import Note
from llamacpp_instr.log.session import load_session
from llamacpp_instr.log.steps import ON_DEVICES, Account, counted_steps, device_times
from llamacpp_instr.report.tree import leaves
from tests.kit.computes import one_by_one
from tests.kit.in_process import titled
from tests.kit.perfetto_truth import result_times
from tests.kit.reports import rows

LOG = Path(__file__).parent.parent / "fixtures" / "vulkan.log.gz"
MIXED = LOG.with_name("vulkan-mixed.log.gz")
CUDA = LOG.with_name("cuda.log.gz")
CLOSE = 0.01
"""between two tokens are also the sampler and the application: 0.1 to 0.2 ms of 39 to 96"""


def _clock() -> tuple[float, list[float]]:
    """Tokens per second from the start to the last token, and in each step, by the application's
    clock."""
    (note,) = (event for _, event in read_events(LOG) if isinstance(event, Note))
    times = np.array(note.data["times"])
    steps = np.diff(times) / 1e9
    return (len(times) - 1) / float(times[-1] - times[0]) * 1e9, (
        np.array([4] + [1] * 15) / steps
    ).tolist()


@pytest.mark.parametrize("log", [LOG, MIXED, CUDA])
def test_its_log_is_whole(log: Path) -> None:
    assert list(check_log(log)) == []


def test_speeds_are_those_of_the_clock() -> None:
    whole, steps = _clock()
    session = load_session(LOG)
    reports = {of["title"]: of for of in titled([of.to_json() for of in compute_summary(session)])}
    by_clock = reports["Time by the clock"]["figures"]["tokens/s"]["value"]
    assert by_clock == pytest.approx(whole, rel=CLOSE)
    decode = next(row for row in reports["Speed"]["rows"] if row["Phase"] == "decode")
    assert decode["tokens/s median"] == pytest.approx(np.median(steps[1:]), rel=CLOSE)

    (stats,) = compute_stats(session, "phase")
    mean = {row["phase"]: row["mean"] for row in rows(stats)}
    assert 4e9 / mean["prefill"] == pytest.approx(steps[0], rel=CLOSE)
    assert mean["decode"] == pytest.approx(np.mean([1e9 / rate for rate in steps[1:]]), rel=CLOSE)

    (request,) = find_requests(session)[1]
    assert 16e9 / request.total == pytest.approx(whole, rel=CLOSE)
    assert request.to_first_token == pytest.approx(4e9 / steps[0], rel=CLOSE)
    assert 1e9 / request.between_tokens == pytest.approx(steps[1:], rel=CLOSE)

    submitted = session.steps["returned"] - session.steps["begin"]
    assert np.median(1e9 / submitted[1:]) > 20 * np.median(steps[1:]), "what would be shown else"


def test_times_on_a_real_gpu_are_those_of_the_clock() -> None:
    """An H100: the demo model, a prompt of 32 tokens and 40 decodes. The application read its clock
    before each decode, and after it had searched the logits for the next token."""
    prefill, median, mean = 1.618345e6, 0.1762005e6, 0.1977861e6
    session = load_session(CUDA)
    (request,) = find_requests(session)[1]
    assert np.median(request.between_tokens) == pytest.approx(median, rel=CLOSE)
    assert request.total == pytest.approx(prefill + 40 * mean, rel=CLOSE)
    reports = {of["title"]: of for of in titled([of.to_json() for of in compute_summary(session)])}
    spent = {row["Block"]: row for row in reports["Where the time went"]["rows"]}
    assert sum(spent[part]["of decode"] for part in ("submission", "device waits")) > 0.8


def test_what_is_not_known_is_not_shown() -> None:
    """The kernels of the device: only the embedding was computed on the CPU."""
    session = load_session(LOG)
    (stats,) = compute_stats(session, "phase")
    assert {row["bytes/s"] for row in rows(stats)} == {None}
    (ops,) = compute_stats(session, "op")
    (row,) = rows(ops)
    assert (row["op"], row["count"]) == ("GET_ROWS", 16)
    assert any("Vulkan0" in note for note in ops.notes)


def test_the_counters_of_traces_are_those_of_the_clock() -> None:
    _, steps = _clock()
    written = io.BytesIO()
    write_chrome(read_events(LOG), written)
    events = json.loads(written.getvalue())["traceEvents"]
    values = [e["args"]["value"] for e in events if e["name"] == "tokens/s"]
    assert [value for value in values if value] == pytest.approx(steps, rel=CLOSE)
    achieved = [e for e in events if e["name"].startswith("achieved")]
    assert achieved == [], "no log times what the device computed"


def test_waiting_for_a_device_is_not_waiting_for_threads() -> None:
    """The KV cache of this session was on the CPU, the layers on the device: five parts each."""
    events = [json.loads(line) for line in gzip.decompress(MIXED.read_bytes()).splitlines()]
    graphs = {e["graph"]: e["splits"] for e in events if e["event"] == "graph"}
    graph_of = {e["compute"]: graphs[e["graph"]] for e in events if e["event"] == "compute"}
    device = 0
    for e in events:
        if e["event"] == "splits":
            backends = [graph_of[e["compute"]][i]["backend"] for i in e["split"]]
            assert backends == ["CPU", "Vulkan0"] * 5
            device += sum(e["gap"]) + sum(e["dur"]) - sum(e["dur"][::2])
        elif e["event"] == "step_end":
            device += result_times(events)[e["step"]] - e["t"]

    session = load_session(MIXED)
    time = next(r for r in compute_summary(session) if r.title == "Where the time went")
    by_block = {row["Block"]: row["prefill"] + row["decode"] for row in rows(time)}
    parts_of_device = [part for part in ON_DEVICES if part in by_block]
    whole = int((session.steps["end"] - session.steps["begin"]).sum())
    assert sum(map(by_block.__getitem__, parts_of_device)) == device > 0.99 * whole
    assert sum(by_block.values()) == whole
    assert 0 < by_block["between ops"] < 0.01 * whole
    parts = rows(leaves(build_tree(session)))
    assert sum(row["time"] for row in parts if row["layer"] in ON_DEVICES) == device

    assert sum(int(of.gap.sum()) for of in session.ops if of.gap is not None) > 0.5 * whole
    steps, _ = counted_steps(session)
    assert "waiting-threads" not in {
        cause.rule for cause in find_causes(Facts(Account(session, steps)))
    }


def test_parts_without_a_pause_have_none() -> None:
    """A log leaves out a column of zeros."""
    session = load_session(MIXED)
    whole = device_times(session)
    gaps = {
        of.compute: int(of.gap.sum())
        for of in one_by_one(session.splits)
        if of.gap is not None and of.compute in whole
    }
    assert len(gaps) == len(whole) > 3
    session.splits[:] = [replace(of, gap=None) for of in session.splits]
    assert device_times(session) == {
        compute: (given, waited - gaps[compute], computed)
        for compute, (given, waited, computed) in whole.items()
    }
