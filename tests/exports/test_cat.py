"""`instr cat`: what is selected is printed, and the flat form can be understood line by line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.cli.look import cat
from llamacpp_instr.converters.exports.tables import load_tables
from llamacpp_instr.log import schema as s
from tests.kit.made_log import encode, make_log

EVENTS = make_log(Random(2).randint, n_contexts=2, level="verbose")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "session.log"
    path.write_bytes(encode(EVENTS))
    return path


def run(*arguments: object) -> bytes:
    result = CliRunner().invoke(cat, list(map(str, arguments)), catch_exceptions=True)
    if isinstance(result.exception, InstrError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout_bytes


def lines(*arguments: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run(*arguments).splitlines()]


def test_without_filters_it_is_the_log_itself(log):
    assert run(log) == log.read_bytes()


def test_events_are_selected_by_name(log):
    names = [line["event"] for line in lines(log, "--event", "token", "--event", "kv")]
    assert names == [e for e in map(s.event_name, EVENTS) if e in ("token", "kv")]
    with pytest.raises(UsageError, match="unknown event `tokens`; the events are session_start, "):
        run(log, "--event", "tokens")


def test_steps_are_selected_with_all_that_was_measured_in_them(log):
    computes = {e.compute for e in EVENTS if isinstance(e, s.Compute) and e.step in (1, 2)}
    got = lines(log, "--steps", "1:2")
    assert {line["step"] for line in got if line["event"] == "step_begin"} == {1, 2}
    ops = [e for e in EVENTS if isinstance(e, s.Ops) and e.compute in computes]
    assert len([line for line in got if line["event"] == "ops"]) == len(ops) > 0
    assert not [line for line in got if line["event"] in ("model", "graph")]
    assert {line["step"] for line in lines(log, "--steps", "1", "--event", "kv")} == {1}
    assert lines(log, "--steps", ":") == lines(log, "--steps", "0:")
    with pytest.raises(UsageError, match="--steps x: give 7, 7-9, 7- or -9"):
        run(log, "--steps", "x")
    with pytest.raises(UsageError, match="--steps 5:3: the first is greater than the last"):
        run(log, "--steps", "5:3")


def test_the_flat_form_has_a_line_for_each_op(log):
    got = lines(log, "--expand", "--event", "op")
    ops = [e for e in EVENTS if isinstance(e, s.Ops)]
    assert len(got) == sum(len(e.dur) for e in ops)
    assert sum(line["dur"] for line in got) == sum(sum(e.dur) for e in ops)
    first = ops[0]
    plan = next(e for e in EVENTS if isinstance(e, s.Plan) and e.plan == first.plan)
    nodes = next(e for e in EVENTS if isinstance(e, s.Graph) and e.graph == plan.graph).nodes
    assert nodes
    third = got[2]
    assert third["t"] == first.t + sum(first.dur[:2]) + sum((first.gap or [0] * 3)[:3])
    assert third["name"] == nodes.name[plan.node[2]]
    assert third["op"] == nodes.op[plan.node[2]]
    assert {"dur", "layer", "type", "ne", "step", "thread"} <= third.keys()


def test_an_op_tells_what_the_table_of_ops_tells():
    recorded = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"
    names = ["step", "phase", "thread", "dur", "block", "weight", "weight_type", "bytes", "flops"]
    table = load_tables(recorded).ops[names].astype(object)
    wanted = [tuple(None if pd.isna(v) else v for v in row) for row in table.to_numpy()]
    got = lines(recorded, "--expand", "--event", "op")
    assert [tuple(line.get(name) for name in names) for line in got] == wanted


def test_the_flat_form_has_begin_and_end_of_each_layer(log):
    got = lines(log, "--expand", "--steps", "0", "--layers", "0")
    steps = [line for line in got if line["event"].startswith("step_")]
    assert [line["event"] for line in steps[:2]] == ["step_begin", "step_end"]
    assert {line["step_name"] for line in steps} == {"layer_0"}
    ops = [line for line in got if line["event"] == "op" and line["thread"] == 0]
    assert steps[0]["t"] == ops[0]["t"]
    assert steps[1]["t"] - steps[0]["t"] == steps[1]["dur"]
    assert max(op["t"] + op["dur"] for op in ops) == max(line["t"] for line in steps)


EVERY_EVENT = Path(__file__).parent.parent / "fixtures" / "every-event.log"


def test_ops_of_one_kernel_and_of_two_have_the_figures_of_the_log():
    first, fused, product = lines(EVERY_EVENT, "--expand", "--event", "op")
    start = 81_005_050_100
    shared = {"event": "op", "type": "f32", "ne": [256], "step": 0, "thread": 0, "phase": "prefill"}
    assert first == shared | {
        "t": start, "dur": 900, "op": "GET_ROWS", "name": "embd", "layer": -1,
        "block": "embedding", "weight": "token_embd.weight", "weight_type": "f16",
        "bytes": 2 * 256 + 4 + 1024, "flops": 0,
    }  # fmt: skip
    assert fused == shared | {
        "t": start + 900 + 150, "dur": 1140, "op": "RMS_NORM", "name": "attn_norm-0", "layer": 0,
        "block": "norm", "weight": "blk.0.attn_norm.weight", "weight_type": "f32",
        "bytes": 3 * 1024, "flops": 256, "fused": ["RMS_NORM", "MUL"],
    }  # fmt: skip
    assert product == shared | {
        "t": start + 900 + 150 + 1140 + 210, "dur": 24000, "op": "MUL_MAT", "name": "Qcur-0",
        "layer": 0, "block": "attention", "weight": "blk.0.attn_q.weight", "weight_type": "f16",
        "bytes": 2 * 256 * 256 + 2 * 1024, "flops": 2 * 256 * 256,
    }  # fmt: skip


def test_layers_are_steps_in_the_flat_form_and_what_has_none_is_left_out():
    steps = [line for line in lines(EVERY_EVENT, "--expand") if line["event"].startswith("step_")]
    layer = {"step_name": "layer_0", "layer": 0, "step": 0}
    begin = 81_005_050_100 + 900 + 150
    assert [line["step_name"] for line in steps] == ["prefill", "layer_0", "layer_0", "prefill"]
    assert steps[1:3] == [
        {"event": "step_begin", "t": begin, **layer},
        {"event": "step_end", "t": begin + 25350, "dur": 25350, **layer},
    ]


@pytest.mark.parametrize(
    ("character", "printed"),
    [
        ("\x1b", "\\u001b"),
        ("\x7f", "\\u007f"),
        ("\x80", "\\u0080"),
        ("\x9f", "\\u009f"),
        ("\u061c", "\\u061c"),
        ("\u202e", "\\u202e"),
        ("\u2069", "\\u2069"),
        ("\xa0", "\xa0"),
        ("ä", "ä"),
        ("\u2027", "\u2027"),
    ],
)
def test_what_steers_a_terminal_is_escaped(tmp_path, character, printed):
    path = tmp_path / "steering.log"
    note = s.Note(t=EVENTS[-1].t, name=f"a{character}b", data=1)
    path.write_bytes(encode([EVENTS[0], note]))
    line = run(path, "--event", "note")
    assert f'"name":"a{printed}b"'.encode() in line
    assert json.loads(line)["name"] == f"a{character}b"


def test_an_impossible_size_is_named_or_left_out(tmp_path):
    recorded = EVERY_EVENT.read_text()
    path = tmp_path / "large.log"
    path.write_text(recorded.replace('"ne":[[256],[256],[256],[256]]', f'"ne":{[[2**40] * 4] * 4}'))
    number = 1 + next(i for i, line in enumerate(recorded.splitlines()) if '"event":"ops"' in line)
    with pytest.raises(InstrError, match=rf":{number}: ops: impossible tensor sizes"):
        run(path, "--expand")
    output = CliRunner().invoke(cat, [str(path), "--expand", "--lenient"])
    assert output.exit_code == 0, output.output
    assert "op" not in {json.loads(line)["event"] for line in output.stdout_bytes.splitlines()}
    assert "1 event" in output.stderr


def test_the_flat_form_has_nothing_that_refers_to_a_graph_line(log):
    names = {line["event"] for line in lines(log, "--expand")}
    assert "op" in names
    assert not names & {"graph", "plan", "ops", "layers"}
    assert {"session_start", "token", "compute", "session_end"} <= names


def test_it_writes_a_file_and_overwrites_none_unless_told_to(log, tmp_path):
    out = tmp_path / "out.ndjson"
    run(log, "-o", out)
    assert out.read_bytes() == log.read_bytes()
    with pytest.raises(UsageError, match=r"out.ndjson exists; use --force to overwrite it"):
        run(log, "-o", out)
    run(log, "-o", out, "--force", "--event", "model")
    assert out.read_bytes().count(b"\n") == 1
    with pytest.raises(UsageError, match="there is no directory"):
        run(log, "-o", tmp_path / "none" / "out")


def test_an_unclosed_log_is_printed_and_reported_as_unclosed(log):
    log.write_bytes(encode(EVENTS)[:-20])
    result = CliRunner().invoke(cat, [str(log)])
    assert result.stdout_bytes == encode(EVENTS[:-1])
    assert result.stderr == (
        f"{log}: the log was not closed and ends in the middle of line {len(EVENTS)}\n"
    )


def test_a_reader_that_has_enough_is_no_error(log):
    log.write_bytes(encode([*EVENTS[:-1], *[s.Note(t=EVENTS[-1].t, name="n", data=1)] * 5000]))
    with subprocess.Popen(
        [sys.executable, "-m", "llamacpp_instr", "cat", str(log), "--expand"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read()
    assert stderr == b""
    assert process.returncode == 0
