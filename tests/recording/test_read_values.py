"""Statistics in a log are numpy's of the values that llama.cpp's own eval callback sees."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import llamacpp_instr
from llamacpp_instr.log.check import check_log
from tests.conftest import read_events
from tests.kit.decoder import Decoder
from tests.kit.native_kit import DEMO, random_model
from tests.kit.programs import native_program
from tests.kit.tiny_models import write_llama

pytestmark = pytest.mark.native
api = pytest.importorskip("llama_cpp.llama_cpp")  # tests of other files need no `instr build`

TOKENS, BINS = 6, 32
TYPES = {
    gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16,
    gguf.GGMLQuantizationType.I32: np.int32, gguf.GGMLQuantizationType.I64: np.int64,
}  # fmt: skip


def dumped(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The nodes' names and values, as `eval_dump` wrote them."""
    with path.open("rb") as file:
        while line := file.readline():
            name, kind, *numbers, size = line.decode().rstrip("\n").split("\t")
            data = file.read(int(size))
            shape, strides = [int(n) for n in numbers[3::-1]], [int(n) for n in numbers[:3:-1]]
            dtype = TYPES[gguf.GGMLQuantizationType(int(kind))]
            yield name, np.ndarray(shape, dtype, data, strides=strides).astype(np.float64).ravel()


def figures(values: np.ndarray) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    counts = {
        "n": len(values), "nan": int(np.isnan(values).sum()), "inf": int(np.isinf(values).sum()),
        "zero": int((values == 0).sum()),
    }  # fmt: skip
    if len(finite):
        counts |= {"min": finite.min(), "max": finite.max()}
        counts |= {"mean": finite.mean(), "std": finite.std()}
    return counts


def model_of(name: str, folder: Path) -> Path:
    """`nan` and `inf` have one such value, in a norm's weight."""
    if name not in ("nan", "inf"):
        return DEMO if name == "demo" else random_model(name)
    path = folder / f"{name}.gguf"
    write_llama(path)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name == "blk.1.ffn_norm.weight":
            tensor.data[0] = float(name)
            tensor.data.flush()
    return path


@pytest.mark.parametrize("name", ["demo", "llama-moe", "nan", "inf"])
def test_the_values_of_nodes_are_numpys(name: str, tmp_path: Path) -> None:
    model = model_of(name, tmp_path)
    program = native_program("eval_dump", tmp_path)
    subprocess.run([program, model, tmp_path / "values", str(TOKENS), "3"], check=True)
    decoder = Decoder(str(model), n_ctx=256)
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(decoder.model))
    log = tmp_path / "a.log"
    with llamacpp_instr.record(log, level="detailed", stats=".*") as session:
        decoder.decode({0: [(3 + 7 * i) % n_vocab for i in range(TOKENS)]})
        nan_seen = session.nan_seen
    assert list(check_log(log)) == []
    (graph,) = read_events(log, "graph")
    stats = read_events(log, "tensor_stats")
    truth = list(dumped(tmp_path / "values"))
    assert nan_seen == any(np.isnan(values).any() for _, values in truth)
    assert any(np.isinf(values).any() for _, values in truth) == (name == "inf")
    assert [event["name"] for event in stats] == [name for name, _ in truth]
    assert [event["node"] for event in stats] == [
        node for node, runs in enumerate(graph["nodes"]["exec"]) if runs
    ]
    kinds = set()
    for event, (_, values) in zip(stats, truth, strict=True):
        node = event["node"]
        kinds.add(graph["nodes"]["type"][node])
        assert (event["compute"], event["graph"]) == (0, graph["graph"])
        assert event["name"] == graph["nodes"]["name"][node]
        assert event.get("layer", -1) == graph["nodes"]["layer"][node]
        expected = figures(values)
        assert {key: event.get(key) for key in expected} == pytest.approx(expected, rel=1e-6)
        assert ("min" in event) == ("min" in expected)
        finite = values[np.isfinite(values)]
        if len(finite):
            bins, _ = np.histogram(finite, BINS, (finite.min(), finite.max()))
            if finite.min() == finite.max():
                bins = np.array([len(finite)] + [0] * (BINS - 1))
            # a value on an edge may be rounded to either side
            assert np.abs(np.subtract(bins, event["hist"])).sum() <= 2 + len(finite) // 1000
        assert sum(event["hist"]) == len(finite)
    assert kinds == {"f32", "f16"} | ({"i32"} if name == "llama-moe" else set())


def test_a_compute_stops_at_a_nan_if_asked(tmp_path: Path) -> None:
    decoder, log = Decoder(str(model_of("nan", tmp_path))), tmp_path / "a.log"
    token = (ctypes.c_int32 * 1)(1)
    with llamacpp_instr.record(log, stats="^ffn_norm-", stop_on_nan=True):
        status = api.llama_decode(decoder.ctx, api.llama_batch_get_one(token, 1))
    assert status == read_events(log, "step_end")[0]["status"] == 2, "aborted"
    assert read_events(log, "compute")[0]["status"] == 1  # GGML_STATUS_ABORTED
    (graph,), (plan,) = read_events(log, "graph"), read_events(log, "plan")
    last = plan["node"][-1] + plan.get("n", [1])[-1] - 1
    assert graph["nodes"]["name"][last] == "ffn_norm-1"
    assert read_events(log, "tensor_stats")[-1]["name"] == "ffn_norm-1"
