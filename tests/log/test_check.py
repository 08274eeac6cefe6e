"""The strict check: valid logs are clean, and every error is found at its line."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.cli.look import check
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.check import MAX_FINDINGS, check_log
from llamacpp_instr.log.reader import read_events
from tests.kit.log_readers import findings
from tests.kit.made_log import encode, make_log
from tests.kit.strategies import logs, unclosed_logs

FIXTURES = Path(__file__).parent.parent / "fixtures"
RECORDED = sorted([*FIXTURES.glob("*.log"), *FIXTURES.glob("*.log.zst")])
ONE = settings(max_examples=40)


# --- properties ---


@given(events=logs())
@ONE
def test_right_logs_are_clean(path, events):
    assert findings(path, encode(events)) == []


@pytest.mark.parametrize("log", RECORDED, ids=lambda path: path.name)
def test_recorded_logs_are_clean(log):
    assert list(map(str, check_log(log))) == []


@given(events=unclosed_logs())
@ONE
def test_an_unclosed_log_has_just_that_one_finding(path, events):
    assert findings(path, encode(events)) == [(len(events), "was not closed: no session_end")]


@given(events=logs(), data=st.data())
@ONE
def test_a_log_cut_in_the_middle_of_a_line_has_just_that_one_finding(path, events, data):
    keep = data.draw(st.integers(1, len(events) - 1))
    whole, line = encode(events[:keep]), encode(events[keep : keep + 1])
    cut = data.draw(st.integers(1, len(line) - 2))
    assert findings(path, whole + line[:cut]) == [
        (keep + 1, "was not closed and ends in the middle of this line")
    ]


@given(events=logs(), data=st.data())
@ONE
def test_a_removed_line_is_found(path, events, data):
    at = data.draw(st.integers(0, len(events) - 1))
    log = encode(events[:at] + events[at + 1 :])
    if at == 0:
        with pytest.raises(LogError, match="not a log"):
            findings(path, log)
    else:
        found = findings(path, log)
        assert found
        assert max(line for line, _ in found) >= at


REFERENCES = {
    s.Model: "model",
    s.Context: "ctx",
    s.Graph: "graph",
    s.Plan: "plan",
    s.StepBegin: "step",
    s.Compute: "compute",
    s.Mark: "mark",
}


def refers(event: s.Event, to: s.Event) -> bool:
    """Whether `event` has a number that `to` gave."""
    key = REFERENCES.get(type(to))
    return key is not None and hasattr(event, key) and getattr(event, key) == getattr(to, key)


@given(events=logs(), data=st.data())
@ONE
def test_swapped_lines_are_found_when_one_refers_to_the_other(path, events, data):
    pairs = [
        (i, j)
        for i in range(1, len(events))
        for j in range(i + 1, len(events))
        if refers(events[j], events[i])
    ]
    i, j = data.draw(st.sampled_from(pairs))
    events[i], events[j] = events[j], events[i]
    found = findings(path, encode(events))
    assert found
    assert max(line for line, _ in found) > i


@given(events=logs(), data=st.data())
@settings(ONE, max_examples=300)
def test_a_flipped_bit_is_found_or_leaves_a_line_of_the_schema(path, events, data):
    log = bytearray(encode(events))
    at = data.draw(st.integers(0, len(log) - 1))
    line = log[:at].count(b"\n")
    log[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = findings(path, bytes(log))
    except LogError:
        assert line == 0
        return
    if found:
        assert max(number for number, _ in found) > line
    else:
        # all that is left to the damage is another value that breaks no rule
        got = [event for _, event in read_events(path)]
        assert len(got) == len(events)
        assert [type(event) for event in got] == [type(event) for event in events]
        assert got[:line] + got[line + 1 :] == events[:line] + events[line + 1 :]


@given(events=logs(), data=st.data())
@ONE
def test_changed_durations_of_ops_are_found_through_the_layers(path, events, data):
    ops = [i for i, e in enumerate(events) if isinstance(e, s.Ops) and e.thread == 0]
    assume(ops)
    at = data.draw(st.sampled_from(ops))
    event = events[at]
    assert isinstance(event, s.Ops)
    event.dur = list(event.dur)
    event.dur[data.draw(st.integers(0, len(event.dur) - 1))] += data.draw(st.integers(1, 9))
    found = findings(path, encode(events))
    assert at + 1 in [line for line, _ in found]


EVENTS = make_log(Random(3).randint, n_contexts=1, level="verbose")


# --- the command ---


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(check, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit | LogError)
    if isinstance(result.exception, LogError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, result.stdout


def test_the_command_says_clean_or_finding_and_exits_accordingly(path, tmp_path):
    path.write_bytes(encode(EVENTS))
    assert run(path) == (0, f"{path}: clean\n")
    assert run("--json", path) == (0, "[]\n")
    cut = tmp_path / "cut.log"
    cut.write_bytes(encode(EVENTS[:-1]))
    last = len(EVENTS) - 1
    assert run(path, cut) == (
        1,
        f"{path}: clean\n{cut}:{last}: was not closed: no session_end\n",
    )
    code, output = run("--json", cut)
    assert code == 1
    assert json.loads(output) == [
        {"path": str(cut), "line": last, "message": "was not closed: no session_end"}
    ]
    assert run(tmp_path / "none.log") == (2, f"{tmp_path / 'none.log'}: no such file")


def test_old_dialects_cannot_be_checked():
    (finding,) = check_log(FIXTURES / "dialects" / "flat-type.log")
    assert "flat-type dialect of an earlier fork: it can be converted" in finding.message


def test_a_file_of_wrong_lines_is_not_checked_to_its_end(path):
    (first,) = RECORDED[0].read_bytes().splitlines(keepends=True)[:1]
    found = findings(path, first + b"\n" * (2 * MAX_FINDINGS))
    assert len(found) == MAX_FINDINGS + 1
    assert {message for _, message in found[:-1]} == {"an empty line"}
    assert "more than 10,000 findings" in found[-1][1]
