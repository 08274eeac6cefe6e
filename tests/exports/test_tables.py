"""The tables hold what the log holds: row by row against its lines, in parts as in one piece."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings

from llamacpp_instr.converters.exports.tables import NAMES, load_tables, stream_tables
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import load_parts
from tests.kit.made_log import encode, make_log
from tests.kit.strategies import logs, unclosed_logs

FIXTURES = Path(__file__).parent.parent / "fixtures"
RECORDED = FIXTURES / "demo-verbose.log"
EVERY_EVENT = FIXTURES / "every-event.log"


def written(directory: Path, events: list[s.Event]) -> Path:
    path = directory / "session.log"
    path.write_bytes(encode(events))
    return path


def naive_ops(records: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """Every kernel of every thread, worked out line by line."""
    graphs: dict[int, Any] = {}
    plans: dict[int, Any] = {}
    phase: dict[int, str] = {-1: ""}
    step: dict[int, int] = {}
    for event in records:
        kind = event["event"]
        if kind == "graph":
            graphs[event["graph"]] = event
        elif kind == "plan":
            plans[event["plan"]] = event
        elif kind == "step_begin":
            phase[event["step"]] = event["phase"]
        elif kind == "compute":
            step[event["compute"]] = event.get("step", -1)
        elif kind == "ops":
            plan = plans[event["plan"]]
            nodes = graphs[plan["graph"]]["nodes"]
            gaps = event.get("gap") or [0] * len(event["dur"])
            waits = event.get("wait") or [None] * len(event["dur"])
            ends = accumulate(gap + dur for gap, dur in zip(gaps, event["dur"], strict=True))
            of = step[event["compute"]]
            columns = (plan["node"], event["dur"], waits, ends)
            for node, dur, wait, end in zip(*columns, strict=True):
                begin = event["t"] + end - dur
                where = (of, phase[of], event.get("thread", 0), nodes["layer"][node])
                yield (*where, nodes["op"][node], begin, dur, wait)


def rows(ops: pd.DataFrame) -> list[tuple[Any, ...]]:
    first = [op.partition("+")[0] for op in ops.op]
    phase = ["" if pd.isna(phase) else phase for phase in ops.phase]
    wait = [None if pd.isna(wait) else wait for wait in ops.wait]
    columns = (ops.step, phase, ops.thread, ops.layer, first, ops.begin, ops.dur, wait)
    return list(zip(*columns, strict=True))


@given(events=logs() | unclosed_logs())
@settings(max_examples=15)
def test_rows_are_those_of_the_log(events, tmp_path_factory):
    path = written(tmp_path_factory.mktemp("log"), events)
    tables = load_tables(path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows(tables.ops) == list(naive_ops(records))
    assert tables.ops.dur.sum() == sum(sum(e.dur) for e in events if isinstance(e, s.Ops))
    assert tables.layers.dur.sum() == sum(sum(e.dur) for e in events if isinstance(e, s.Layers))
    ended = [e for e in events if isinstance(e, s.StepEnd)]
    begun = {e.step: e.t for e in events if isinstance(e, s.StepBegin)}
    assert tables.steps.dur.tolist() == [e.t - begun[e.step] for e in ended]
    assert tables.tokens.text.tolist() == [e.text for e in events if isinstance(e, s.Token)]
    of_log = [event for event in records if event["event"] == "compute"]
    for name in ("compute", "graph", "ctx", "step", "source", "reused", "n_threads", "t", "dur"):
        assert tables.computes[name].tolist() == [event[name] for event in of_log], name
    assert tables.computes.begin.tolist() == [e["t"] + e.get("start", 0) for e in of_log]
    ctx_of = {event["compute"]: event["ctx"] for event in of_log}
    assert tables.ops.ctx.tolist() == [ctx_of[compute] for compute in tables.ops.compute]
    phases = tables.computes.merge(tables.steps, on="step", suffixes=("", "_of_step"))
    assert (phases.phase.astype(str) == phases.phase_of_step.astype(str)).all()


@given(events=logs() | unclosed_logs())
@settings(max_examples=10)
def test_the_pieces_make_up_the_tables(events, tmp_path_factory, request):
    path = written(tmp_path_factory.mktemp("log"), events)
    whole = load_tables(path)
    monkeypatch = pytest.MonkeyPatch()
    request.addfinalizer(monkeypatch.undo)
    monkeypatch.setattr(
        "llamacpp_instr.converters.exports.tables.load_parts",
        lambda path, on_progress, **how: load_parts(path, on_progress, 1, **how),
    )
    pieces: dict[str, list[pd.DataFrame]] = {name: [] for name in NAMES}
    for name, frame in stream_tables(path):
        pieces[name].append(frame)
    for name in NAMES:
        table = getattr(whole, name)
        joined = pd.concat(pieces[name], ignore_index=True).astype(table.dtypes)
        if name == "marks":  # those that never end are known only at the log's end
            table, joined = (f.sort_values("mark", ignore_index=True) for f in (table, joined))
        pd.testing.assert_frame_equal(joined, table, check_categorical=False)


def test_a_part_ends_where_no_step_is_open():
    parts = list(load_parts(RECORDED, part_rows=500, every_thread=True))
    assert len(parts) > 3
    for part in parts:
        inside = set(part.steps["step"].tolist())
        assert set(part.computes["step"].tolist()) == inside
        computes = {n for of in part.ops for n in of.compute.tolist()}
        assert computes == set(part.computes["compute"].tolist())
        assert not part.open_steps
    assert [part.log_end.state for part in parts[-2:]] == ["unclosed", "closed"]
    assert sum(of.dur.size for part in parts for of in part.ops) == len(load_tables(RECORDED).ops)


def test_an_op_says_what_it_is_and_what_it_reached():
    ops = load_tables(RECORDED).ops
    up = ops[(ops.weight == "blk.2.ffn_up.weight") & (ops.thread == 0)]
    assert len(up) == 24
    first = up.iloc[0]
    # ffn_up is 256 x 768 in f16, the prompt has 5 tokens: 2 * 5 * 768 * 256
    assert (first.op, first.label, first.block) == ("MUL_MAT", "MUL_MAT f16", "feed-forward")
    assert (first["shape"], first.type, first.weight_type) == ("768x5", "f32", "f16")
    assert (first.layer, first.step, first.phase, first.n_nodes) == (2, 0, "prefill", 1)
    assert first.flops == 2 * 5 * 768 * 256
    assert first.bytes == 768 * 256 * 2 + 5 * 256 * 4 + 5 * 768 * 4
    assert first.gflop_per_s == pytest.approx(first.flops / first.dur)
    assert first.gb_per_s == pytest.approx(first.bytes / first.dur)
    fused = ops[ops.label == "RMS_NORM+MUL"].iloc[0]
    assert (fused.n_nodes, fused.weight, fused["name"]) == (
        2,
        "blk.0.attn_norm.weight",
        "attn_norm-0",
    )


def test_messages_notes_and_values_are_those_of_the_log(tmp_path):
    lines = [json.loads(line) for line in EVERY_EVENT.read_text().splitlines()]
    values = next(line for line in lines if line["event"] == "tensor_stats")
    hollow = {**values, "node": 2, "name": "none", "nan": 256, "hist": []}
    for name in ("min", "max", "mean", "std"):
        del hollow[name]
    path = tmp_path / "session.log"
    at = lines.index(values)
    path.write_text(
        "".join(json.dumps(e) + "\n" for e in [*lines[: at + 1], hollow, *lines[at + 1 :]])
    )
    tables = load_tables(path)
    (message,) = (line for line in lines if line["event"] == "message")
    assert tables.messages.to_dict("records") == [{k: message[k] for k in ("t", "level", "text")}]
    (note,) = (line for line in lines if line["event"] == "note")
    (row,) = tables.notes.to_dict("records")
    assert (row["t"], row["name"], json.loads(row["data"])) == (
        note["t"],
        note["name"],
        note["data"],
    )
    first, second = tables.tensor_stats.to_dict("records")
    same = set(values) - {"event", "hist"}
    assert {name: first[name] for name in same} == {name: values[name] for name in same}
    assert (first["step"], first["phase"], first["hist"]) == (0, "prefill", "16,112,112,16")
    assert np.isnan([second[name] for name in ("min", "max", "mean", "std")]).all()
    assert (second["nan"], second["hist"]) == (256, "")


def test_only_the_caller_has_rates():
    ops = load_tables(RECORDED).ops
    assert ops[ops.thread == 1].gb_per_s.isna().all()
    assert ops[(ops.thread == 0) & (ops.block == "feed-forward")].gb_per_s.notna().all()
    assert (ops.wait <= ops.dur).all()


def test_the_facts_are_there():
    tables = load_tables(RECORDED)
    weight = tables.tensors.set_index("name").loc["blk.0.ffn_up.weight"]
    assert (weight["shape"], weight.bytes, weight.bits_per_weight) == ("256x768", 393216, 16.0)
    nodes = tables.nodes
    assert nodes[nodes["name"] == "norm-0"].params.unique().tolist() == ["eps=1e-05"]
    assert set(nodes.backend) == {"CPU"}
    assert not nodes[nodes.op == "VIEW"].executed.any()
    assert tables.kv.cells[0] == "0,1,2,3,4"
    assert tables.marks.dur[0] == tables.marks.end[0] - tables.marks.begin[0]
    assert tables.memory.context.sum() == 1 << 20
    prefill = tables.steps.iloc[0]
    assert prefill.tokens_per_s == pytest.approx(5e9 / prefill.dur)


def test_a_level_has_what_it_records(tmp_path):
    minimal = load_tables(written(tmp_path, make_log(Random(5).randint, 1, "minimal")))
    assert len(minimal.ops) == len(minimal.nodes) == 0
    assert len(minimal.layers)
    assert len(minimal.steps)
    detailed = load_tables(written(tmp_path, make_log(Random(5).randint, 1, "detailed")))
    assert set(detailed.ops.thread) == {0}
    assert detailed.ops.wait.isna().all()
    assert list(detailed.ops.columns) == list(minimal.ops.columns)
    assert (detailed.ops.dtypes.astype(str) == minimal.ops.dtypes.astype(str)).all()


def test_words_are_categories_and_numbers_are_numbers():
    ops = load_tables(RECORDED).ops
    words = ["phase", "device", "block", "op", "name", "label", "type", "shape", "weight",
             "weight_type"]  # fmt: skip
    for name in ops.columns:
        assert isinstance(ops[name].dtype, pd.CategoricalDtype) == (name in words), name
    assert ops.begin.dtype == ops.dur.dtype == np.int64


@pytest.mark.parametrize("name", ["flat-event.log", "flat-type.log"])
def test_old_dialects_have_tables(name):
    tables = load_tables(FIXTURES / "dialects" / name)
    assert len(tables.steps) == 1
    assert len(tables.ops) == 0
