"""A log of one event of each kind, in a Perfetto trace and in Chrome's: each figure of the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.converters.exports.perfetto import Options
from tests.exports import test_chrome as chrome
from tests.exports.test_perfetto import Back, convert

LOG = Path(__file__).parent.parent / "fixtures" / "every-event.log"
START = 81_000_000_000
"""all times below are after it, in ns"""
STEP, COMPUTE_BEGIN, COMPUTE_END = (5_000_000, 100_000), 5_050_000, 5_080_000
REQUEST = {
    "context": 0, "sequence": 0, "mark": "retrieval", "prompt_tokens": 1, "reused_tokens": 0,
    "output_tokens": 1, "to_first_token_ns": 1_119_000, "queued_ns": 1_000_000, "first_step": 0,
    "last_step": 0,
}  # fmt: skip
MODEL = {"model": "demo", "arch": "llama", "ftype": "F16", "params": 387328, "bytes": 644096}
COMPUTE = {"compute": 0, "graph": 0, "source": "decode", "n_tokens": 1, "n_threads": 2,
           "status": 0, "reused": False}  # fmt: skip
PHASES = [
    (5_000_000, 9500, "prepare", {}),
    (5_010_000, 9000, "apply", {}),
    (5_019_000, 21_000, "build", {}),
    (5_040_000, 8000, "alloc", {}),
    (5_048_000, 1500, "inputs", {}),
    (COMPUTE_BEGIN, 30_000, "compute", COMPUTE),
    (COMPUTE_END, 2100, "readback", {}),
]
KERNELS = [
    # start, duration, name, bytes, FLOPs
    (5_050_100, 900, "GET_ROWS token_embd", 2 * 256 + 4 + 1024, 0),
    (5_051_150, 1140, "RMS_NORM+MUL attn_norm", 3 * 1024, 256),
    (5_052_500, 24_000, "MUL_MAT attn_q", 2 * 256 * 256 + 2 * 1024, 2 * 256 * 256),
]
BYTES = sum(kernel[3] for kernel in KERNELS)
FLOPS = sum(kernel[4] for kernel in KERNELS)
LAYERS = [(5_050_100, 900, "no layer", {"layer": -1}), (5_051_150, 25_350, "layer 0", {"layer": 0})]
BLOCKS = [
    (5_050_100, 900, "embedding", {"layer": -1}),
    (5_051_150, 1140, "norm", {"layer": 0}),
    (5_052_500, 24_000, "attention", {"layer": 0}),
]


@pytest.fixture
def perfetto(tmp_path: Path) -> Back:
    return Back(convert(tmp_path / "a.log", LOG.read_bytes(), Options())[0])


@pytest.fixture
def chrome_s(tmp_path: Path) -> list[dict[str, Any]]:
    return chrome.convert(tmp_path / "a.log", LOG.read_bytes())


SLICES = {
    ("phases", "phase"): PHASES,
    ("layers", "layer"): LAYERS,
    ("layers", "block"): BLOCKS,
    ("requests", "request"): [(4_000_000, 1_200_000, "retrieval", REQUEST)],
    ("device waits", "wait"): [(5_090_000, 1200, "synchronize", {})],
}
TOKEN = {"text": " the", "id": 262, "index": 0, "p": 0.75, "step": 0}
OF_PERFETTO = SLICES | {
    ("session", "model"): [
        (1000, 2_500_000, "load",
         MODEL | {"tensors": 3, "n_layer": 1, "n_embd": 256, "rope.freq_base": 10000.0}),
    ],
    ("session", "step"): [
        (*STEP, "prefill",
         {"step": 0, "tokens": 1, "outputs": 1, "sequences": 1, "thread": 4242, "positions": "0",
          "status": 0, "ubatches": 1, "graphs_reused": 0, "recorder_ns": 4000}),
    ],
    ("session", "token"): [(*STEP, '" the"', TOKEN)],
    ("sampler", "sampler"): [(5_110_000, 9000, "sample", TOKEN)],
    ("marks", "mark"): [(4_000_000, 1_200_000, "retrieval", {"mark": 0, "thread": 4242})],
    ("splits", "split"): [
        (5_050_050, 29_000, "CPU", {"split": 0, "nodes": "0 to 3", "ends_with": "computation"}),
    ],
    ("tensor statistics", "stats"): [
        (COMPUTE_END, 0, "statistics",
         {"name": "Qcur-0", "layer": 0, "n": 256, "min": -1.75, "max": 2.0, "mean": 0.0625,
          "std": 0.5, "nan": 0, "inf": 0, "zero": 0}),
    ],
    ("messages", "note"): [(5_210_000, 0, "documents", {"data": '{"found":3}'})],
    ("messages", "message"): [
        (5_220_000, 0, "warn", {"text": "n_ctx_seq (512) < n_ctx_train (1024)"}),
    ],
}  # fmt: skip


def test_each_event_is_a_slice_of_perfetto_s_with_its_figures(perfetto: Back) -> None:
    found: dict[tuple[str, str], list[Any]] = {}
    for of in perfetto.slices:
        row = of["ts"] - START, of["dur"], of["name"], of["args"]
        found.setdefault((of["track"], of["category"]), []).append(row)
    kernels = [row for (track, category), rows in found.items()
               if track == "layers" and category not in ("layer", "block")
               for row in rows]  # fmt: skip
    found = {key: rows for key, rows in found.items()
             if key[0] != "layers" or key[1] in ("layer", "block")}  # fmt: skip
    assert found == OF_PERFETTO
    assert [
        (begin, dur, name, args["bytes"], args.get("flops", 0))
        for begin, dur, name, args in kernels
    ] == KERNELS
    for _, dur, _, args in kernels:
        assert args["GB/s"] == args["bytes"] / dur
        assert args.get("GFLOP/s", 0) == args.get("flops", 0) / dur


def test_each_event_is_a_slice_of_chrome_s_with_its_figures(chrome_s: list[dict[str, Any]]) -> None:
    names = chrome.track_names(chrome_s)
    found: dict[tuple[str, str], list[Any]] = {}
    for of in chrome_s:
        if of["ph"] == "X":
            row = of["ts"] - START, of["dur"], of["name"], of["args"]
            found.setdefault((names[of["tid"]], of["cat"]), []).append(row)
    token = {"text": " the", "id": 262, "step": 0}
    kernels = [found.pop(("layers", kind))[0] for kind in ("embedding", "norm", "attention")]
    assert found == SLICES | {
        ("steps", "model"): [(1000, 2_500_000, "load", MODEL)],
        ("steps", "step"): [
            (*STEP, "prefill", {"step": 0, "tokens": 1, "outputs": 1, "status": 0}),
        ],
        ("steps", "token"): [(*STEP, '" the"', token)],
        ("sampler", "sampler"): [(5_110_000, 9000, "sample", token)],
        ("marks", "mark"): [(4_000_000, 1_200_000, "retrieval", {"thread": 4242})],
    }
    assert [
        (begin, dur, name, args["bytes"], args.get("flops", 0))
        for begin, dur, name, args in kernels
    ] == KERNELS
    for _, dur, _, args in kernels:
        # in whole thousandths
        assert int(args["GB/s"] * 1000) == args["bytes"] * 1000 // dur
        assert int(args.get("GFLOP/s", 0) * 1000) == args.get("flops", 0) * 1000 // dur
    (message,) = [of for of in chrome_s if of["ph"] == "i"]
    assert (message["ts"] - START, message["name"]) == (5_220_000, "warn")
    assert message["args"] == {"text": "n_ctx_seq (512) < n_ctx_train (1024)"}


NORM = {
    "what": "root-mean-square norm, norm weight", "tensor": "attn_norm-0", "op": "RMS_NORM+MUL",
    "layer": 0, "block": "norm", "output": "f32 [256]", "source_0": "embd f32 [256]",
    "source_1": "blk.0.attn_norm.weight f32 [256]", "weight": "blk.0.attn_norm.weight",
    "weight_type": "f32", "bytes": 3072, "bytes_read": 2048, "bytes_written": 1024, "flops": 256,
    "fused_with": "MUL attn_norm-0", "backend": "CPU", "buffer": "CPU",
}  # fmt: skip


def test_a_fused_kernel_tells_all_that_the_graph_has_of_it(
    perfetto: Back, chrome_s: list[dict[str, Any]]
) -> None:
    for events, category in ((perfetto.slices, "category"), (chrome_s, "cat")):
        (of,) = [e["args"] for e in events if e.get(category) == "norm"]
        assert float(of.pop("eps")) == pytest.approx(1e-5)
        del of["GB/s"], of["GFLOP/s"]
        assert of == NORM


def over(name: str, begin: int, end: int, value: float) -> list[tuple[str, int, float]]:
    """A counter that is zero again at the end."""
    return [(name, begin, value), (name, end, 0)]


RATES = [
    *over("achieved GB/s", COMPUTE_BEGIN, COMPUTE_END, BYTES / 30_000),
    *over("achieved GFLOP/s", COMPUTE_BEGIN, COMPUTE_END, FLOPS / 30_000),
    *over("tokens/s", STEP[0], sum(STEP), 10_000),
]
KV = [("KV cells", 5_010_000, 1), ("KV bytes", 5_010_000, 1024)]
MEMORY = [
    ("CPU_Mapped model", 644096), ("CPU_Mapped context", 0), ("CPU_Mapped compute", 0),
    ("CPU model", 0), ("CPU context", 524288), ("CPU compute", 1048576),
]  # fmt: skip


def test_counters_of_perfetto_s_are_the_figures_of_the_log(perfetto: Back) -> None:
    found = [(name, t - START, value) for name, t, value in perfetto.counters]
    assert sorted(found) == sorted(
        [
            *RATES,
            *KV,
            *((name, 3_000_000, held) for name, held in MEMORY),
            ("resident memory", 3_000_000, 52428800),
            *over("minor page faults", STEP[0], sum(STEP), 12),
            *over("major page faults", STEP[0], sum(STEP), 0),
            *over("load", 0, 5_230_000, 0.42),
            # none of the time that the CPUs were busy is another process's
            *over("waiting for a CPU", 0, 5_230_000, 0),
            *((f"Qcur-0 {of}", COMPUTE_END, value)
              for of, value in (("min", -1.75), ("max", 2), ("mean", 0.0625), ("std", 0.5))),
        ]
    )  # fmt: skip


def test_counters_of_chrome_s_are_the_figures_of_the_log(chrome_s: list[dict[str, Any]]) -> None:
    found = [
        (of["name"], of["ts"] - START, float(of["args"]["value"]))
        for of in chrome_s
        if of["ph"] == "C"
    ]
    assert sorted(found) == sorted(
        [
            *RATES,
            *KV,
            *((f"memory {name}", 3_000_000, held) for name, held in MEMORY),
            *over("page faults", STEP[0], sum(STEP), 12),
        ]
    )


def test_tracks_of_chrome_s_have_an_order(chrome_s: list[dict[str, Any]]) -> None:
    (process,) = [of for of in chrome_s if of["name"] == "process_name"]
    assert (process["pid"], process["args"]) == (1, {"name": "session"})
    names = chrome.track_names(chrome_s)
    places = {names[of["tid"]]: of["args"]["sort_index"]
              for of in chrome_s if of["name"] == "thread_sort_index"}  # fmt: skip
    assert sorted(places, key=places.__getitem__) == [
        "steps", "marks", "requests", "phases", "layers", "device waits", "sampler", "messages",
    ]  # fmt: skip


def test_a_request_leads_to_the_step_that_served_it(perfetto: Back) -> None:
    assert perfetto.flows_out == perfetto.flows_in == {1: 1}
