"""The tables of a log of one event of each kind: each column that is not a mere copy, by hand."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from llamacpp_instr.converters.exports.names import LONGEST_HOST, host_of, id_of, name_of
from llamacpp_instr.converters.exports.tables import Tables, load_tables
from llamacpp_instr.log import schema as s

LOG = Path(__file__).parent.parent / "fixtures" / "every-event.log"
LINES = [json.loads(line) for line in LOG.read_text().splitlines()]
T = 81_000_000_000
OF_STEP = {"step": 0, "phase": "prefill"}
EVENTS = {
    "steps": ("step_begin", "step_end"), "tensors": ("tensor",), "tokens": ("token",),
    "kv": ("kv",), "machine": ("machine",), "computes": ("compute",), "messages": ("message",),
    "tensor_stats": ("tensor_stats",),
}  # fmt: skip


@cache
def tables() -> Tables:
    return load_tables(LOG)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows without what is missing."""
    return [
        {name: value for name, value in row.items() if not pd.isna(value)}
        for row in table.to_dict("records")
    ]


DERIVED: dict[str, list[dict[str, Any]]] = {
    "steps": [
        OF_STEP
        | {"begin": T + 5_000_000, "end": T + 5_100_000, "dur": 100_000, "tokens_per_s": 10_000.0,
           "disturbed": False, "majflt": 0},
    ],
    "tensors": [
        {"layer": -1, "shape": "256x1000", "n_elements": 256_000, "bits_per_weight": 16.0},
        {"shape": "256", "n_elements": 256, "bits_per_weight": 32.0},
        {"shape": "256x256", "n_elements": 65_536, "bits_per_weight": 16.0},
    ],
    "tokens": [{"begin": T + 5_110_000}],
    "kv": [{"cache": 0, "kind": "kv"}],
    "machine": [{"begin": T, "end": T + 5_230_000}],
    "computes": [OF_STEP | {"begin": T + 5_050_000, "status": 0}],
    "messages": [{}],
    "tensor_stats": [OF_STEP | {"hist": "16,112,112,16"}],
}  # fmt: skip


@pytest.mark.parametrize("name", DERIVED)
def test_a_column_is_copied_or_derived_from_its_event(name: str) -> None:
    first, *more = EVENTS[name]
    lines = [line for line in LINES if line["event"] == first]
    for kind in more:
        lines = [line | other for line, other in zip(
            lines, [of for of in LINES if of["event"] == kind], strict=True)]  # fmt: skip
    found = records(getattr(tables(), name))
    assert len(found) == len(lines)
    for row, line, derived in zip(found, lines, DERIVED[name], strict=True):
        assert row == {key: line[key] for key in row if key not in derived} | derived


def test_a_request_has_its_times() -> None:
    assert records(tables().requests) == [
        {"request": 1, "ctx": 0, "sequence": 0, "name": "retrieval", "arrival": T + 4_000_000,
         "begin": T + 5_000_000, "first_token": T + 5_119_000, "end": T + 5_200_000,
         "queued": 1_000_000, "prompt": 1, "reused": 0, "output": 1},
    ]  # fmt: skip


def test_layers_and_ops_have_the_times_of_their_kernels() -> None:
    where = OF_STEP | {"compute": 0}
    assert records(tables().layers) == [
        where | {"layer": -1, "begin": T + 5_050_100, "dur": 900},
        where | {"layer": 0, "begin": T + 5_051_150, "dur": 25_350},
    ]
    shared = where | {"ctx": 0, "thread": 0, "plan": 0, "type": "f32", "shape": "256",
                      "work_bound": False, "device": "CPU"}  # fmt: skip
    n = 2 * 256 * 256
    assert records(tables().ops) == [
        shared
        | {"kernel": 0, "node": 0, "n_nodes": 1, "layer": -1, "block": "embedding",
           "op": "GET_ROWS", "name": "embd", "label": "GET_ROWS", "weight": "token_embd.weight",
           "weight_type": "f16", "flops": 0, "bytes": 1540, "begin": T + 5_050_100, "dur": 900,
           "gb_per_s": 1540 / 900},
        shared
        | {"kernel": 1, "node": 1, "n_nodes": 2, "layer": 0, "block": "norm",
           "op": "RMS_NORM+MUL", "name": "attn_norm-0", "label": "RMS_NORM+MUL",
           "weight": "blk.0.attn_norm.weight", "weight_type": "f32", "flops": 256, "bytes": 3072,
           "begin": T + 5_051_150, "dur": 1140, "gb_per_s": 3072 / 1140,
           "gflop_per_s": 256 / 1140},
        shared
        | {"kernel": 2, "node": 3, "n_nodes": 1, "layer": 0, "block": "attention",
           "op": "MUL_MAT", "name": "Qcur-0", "label": "MUL_MAT f16",
           "weight": "blk.0.attn_q.weight", "weight_type": "f16", "flops": n, "bytes": n + 2048,
           "begin": T + 5_052_500, "dur": 24_000, "gb_per_s": (n + 2048) / 24_000,
           "gflop_per_s": n / 24_000},
    ]  # fmt: skip


def test_nodes_are_those_of_the_graph() -> None:
    (graph,) = [line for line in LINES if line["event"] == "graph"]
    nodes, found = graph["nodes"], records(tables().nodes)
    for name in ("name", "op", "layer", "type", "bytes"):
        assert [row[name] for row in found] == nodes[name]
    assert [row["node"] for row in found] == [0, 1, 2, 3]
    assert {(row["graph"], row["backend"], row["buffer"], row["executed"], row["shape"])
            for row in found} == {(0, "CPU", "CPU", True, "256")}  # fmt: skip
    assert tables().nodes.executed.dtype == bool
    assert tables().nodes["bytes"].dtype == "int64"
    assert [row["src"] for row in found] == ["-1,-2", "0", "1,-3", "-4,2"]
    assert [row["block"] for row in found] == ["embedding", "norm", "norm", "attention"]
    assert [row["bytes_moved"] for row in found] == [1540, 2048, 3072, 133_120]
    assert [row["flops"] for row in found] == [0, 0, 256, 131_072]
    assert [row.get("params") for row in found][:3] == [None, "eps=1e-05", None]
    assert [(row.get("weight"), row.get("weight_type")) for row in found] == [
        ("token_embd.weight", "f16"), (None, None), ("blk.0.attn_norm.weight", "f32"),
        ("blk.0.attn_q.weight", "f16"),
    ]  # fmt: skip


def test_memory_marks_and_notes_have_their_rows() -> None:
    held = {"t": T + 3_000_000, "ctx": 0, "rss": 52_428_800}
    assert records(tables().memory) == [
        held | {"buffer": "CPU_Mapped", "model": 644_096, "context": 0, "compute": 0},
        held | {"buffer": "CPU", "model": 0, "context": 524_288, "compute": 1_048_576},
    ]
    assert records(tables().marks) == [
        {"mark": 0, "name": "retrieval", "begin": T + 4_000_000, "end": T + 5_200_000,
         "dur": 1_200_000, "thread": 4242},
    ]  # fmt: skip
    assert records(tables().notes) == [
        {"t": T + 5_210_000, "name": "documents", "data": '{"found":3}'}
    ]


def test_a_session_says_where_and_when_it_ran() -> None:
    assert records(tables().sessions) == [
        {"id": "5f0c2a9b7d3e1846", "host": "AMD-EPYC-2-cores-8-GiB", "models": "demo",
         "cpu": "AMD EPYC", "os": "Linux 6.1", "level": "detailed", "build": "0.3.36+instr.1",
         "llama_cpp": "a1b2c3d", "cores": 2, "memory": 8 << 30, "perturbed": False,
         "wall": pd.Timestamp("2026-01-02T03:04:05.678Z"), "begin": T},
    ]  # fmt: skip


def start(**changes: Any) -> s.SessionStart:
    fields = {k: v for k, v in LINES[0].items() if k != "event"} | changes
    fields["host"] = s.Host(**(LINES[0]["host"] | changes.get("host", {})))
    fields["process"] = s.Process(**LINES[0]["process"])
    fields["producer"] = s.Producer(**LINES[0]["producer"])
    return s.SessionStart(**fields)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "5f0c2a9b7d3e1846"),
        ({"part": 2}, "5f0c2a9b7d3e1846-2"),
        ({"id": "a" * 64}, "a" * 64),
        ({"id": "a" * 65}, None),
        ({"id": "../x"}, None),
        ({"id": ""}, None),
    ],
)
def test_a_log_has_the_id_of_its_session_or_one_of_its_name(
    changes: dict[str, Any], name: str | None
) -> None:
    found = id_of(start(**changes), "a.log")
    if name is None:
        assert len(found) == 16
        assert found == id_of(None, "a.log") != id_of(None, "b.log")
        int(found, 16)
    else:
        assert found == name


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ({"cpu": ""}, "unknown-2-cores-8-GiB"),
        ({"memory": (17 << 30) // 2 + 1}, "AMD-EPYC-2-cores-9-GiB"),
        ({"cpu": "(R) x/7 @ 2.5GHz"}, "R-x-7-2.5GHz-2-cores-8-GiB"),
        ({"cpu": "x" * 300}, "x" * LONGEST_HOST),
    ],
)
def test_a_machine_is_called_what_it_is(host: dict[str, Any], name: str) -> None:
    assert host_of(start(host=host)) == name


@pytest.mark.parametrize(
    ("name", "path", "description", "called"),
    [
        ("demo", "a/b.gguf", "llama", "demo"),
        ("", "a/b.gguf", "llama", "b.gguf"),
        ("", "b.gguf", "llama", "b.gguf"),
        ("", "", "llama", "llama"),
    ],
)
def test_a_model_has_its_name_or_that_of_its_file(
    name: str, path: str, description: str, called: str
) -> None:
    model = s.Model(t=0, model=0, path=path, name=name, description=description, arch="llama",
                    params=1, bytes=1, ftype="F16", hparams={}, dur=1, n_tensors=0)  # fmt: skip
    assert name_of(model) == called
