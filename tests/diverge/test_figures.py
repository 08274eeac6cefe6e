"""The errors and the KL divergences of `instr diverge`, against numpy, files and `instr quality`."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner, Result

from llamacpp_instr import cli
from llamacpp_instr.debugger.graph import LiveGraph
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.ubatch import Ubatch
from llamacpp_instr.diverge.error import Key, TensorError
from llamacpp_instr.diverge.run import DivergeOptions, Divergences, compare_models
from llamacpp_instr.model.file import load_model_file
from tests.kit.debugger_kit import opened, run
from tests.kit.gguf_files import save
from tests.kit.native_kit import DEMO
from tests.kit.quantized_kit import quantized_demo
from tests.kit.tiny_models import write_bert, write_gpt2, write_llama, write_speaker

TEXT = "Once upon a time there was a little girl who liked to play in the park with her dog."


def compared(b: Path, why: bool = False, memory: int = 2**29) -> Divergences:
    options = DivergeOptions(tokens=16, memory=memory, threads=1)
    a, b_file = load_model_file(DEMO), load_model_file(b)
    return compare_models(a, b_file, TEXT, options, why, lambda *_: None, lambda *_: None)


def instr(*words: object) -> Result:
    return CliRunner().invoke(cli.main, ["diverge", *map(str, words)])


class Collected:
    """The values of all nodes of one compute."""

    def __init__(self) -> None:
        self.values: dict[Key, np.ndarray] = {}

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> list[int]:
        self._keys: dict[int, Key] = {}
        seen: dict[str, int] = {}
        for node in graph.nodes:
            place = seen[node.name] = seen.get(node.name, -1) + 1
            self._keys[node.index] = Key(node.name, place)
        return [node.index for node in graph.nodes if node.runs]

    def passed(self, stop: Stop) -> None:
        self.values[self._keys[stop.node.index]] = stop.values().astype(np.float64)


def all_values(model: Path, log: Path) -> dict[Key, np.ndarray]:
    collected = Collected()
    with opened(model) as loaded:
        tokens = loaded.tokenize(TEXT)[:16]
        run(loaded, log, followers=[collected], prompt=tokens, decodes=0)
    return collected.values


@pytest.mark.native
def test_errors_equal_those_of_numpy_on_the_values_of_both(tmp_path: Path) -> None:
    """In one pass over all tokens; the command computes one token, then the others."""
    b = quantized_demo("Q8_0")
    found = {e.key: e for e in compared(b).errors}
    ours, theirs = (all_values(m, tmp_path / f"{m.stem}.log") for m in (DEMO, b))
    n = 0
    for key, e in found.items():
        a, d = ours[key], theirs[key] - ours[key]
        if e.n != a.size:  # the last layer of an ordinary prefill computes the last token only
            continue
        n += 1
        norm = float(np.linalg.norm(a))
        assert e.relative == pytest.approx(float(np.linalg.norm(d)) / norm, rel=0.02), key
        both = float(np.vdot(a, a + d)) / norm / float(np.linalg.norm(a + d))
        assert e.cosine == pytest.approx(both, abs=1e-5), key
        if e.channels is not None:
            by_channel = (d * d).sum(axis=0)
            assert e.channels[0].sum() == pytest.approx(by_channel.sum(), rel=0.05)
            assert e.channels.shape[1] == a.shape[-1]
    assert n > 50


def test_sums_of_parts_are_those_of_all_values() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 12, 40)).astype(np.float32)
    b[:, 7] += 3
    e = TensorError(Key("x", 0), "MUL_MAT", 0, "attention", (), ())
    for rows in (slice(0, 1), slice(1, 12)):
        e.add(a[rows], b[rows].copy(), has_tokens=True, keeps_rows=True)
    d = b.astype(np.float64) - a
    assert e.nmse == pytest.approx((d * d).sum() / (a.astype(np.float64) ** 2).sum(), rel=1e-6)
    assert e.cosine == pytest.approx(np.corrcoef(a.ravel(), b.ravel())[0, 1], abs=0.02)
    assert e.channels is not None
    assert e.channels[0] == pytest.approx((d * d).sum(axis=0), rel=1e-5)
    assert int(e.channels[0].argmax()) == 7
    assert np.concatenate(e.rows, axis=1)[0] == pytest.approx((d * d).sum(axis=1), rel=1e-5)


def test_infinities_of_a_mask_are_no_error_and_a_nan_in_one_is_infinite() -> None:
    a = np.array([[1.0, -np.inf, 2.0]], np.float32)
    e = TensorError(Key("x", 0), "ADD", 0, "attention", (), ())
    e.add(a, a.copy(), has_tokens=False, keeps_rows=False)
    assert (e.relative, e.cosine) == (0, pytest.approx(1))
    e.add(a, np.array([[1.0, -np.inf, np.nan]], np.float32), has_tokens=False, keeps_rows=False)
    assert e.relative == np.inf


@pytest.mark.native
def test_a_smaller_memory_gives_the_same_errors_in_more_parts() -> None:
    b = quantized_demo("Q8_0")
    wide, narrow = compared(b), compared(b, memory=2**20)
    assert narrow.most_bytes <= 2**20 < wide.most_bytes
    assert len(narrow.errors[0].parts) > len(wide.errors[0].parts)
    for one, other in zip(wide.errors, narrow.errors, strict=True):
        if not one.name_is_fused:
            assert one.relative == pytest.approx(other.relative, rel=0.05), one.key
    assert wide.kl == pytest.approx(narrow.kl, abs=1e-4)


@pytest.mark.native
def test_a_mixture_in_memory_computes_what_its_file_computes(tmp_path: Path) -> None:
    """A file with half of the weights of each model: the KL divergence is that of the exchange."""
    from llamacpp_instr.diverge import run as module

    b = quantized_demo("Q4_0")
    names = {w.name for i, w in enumerate(load_model_file(DEMO).weights) if i % 2}
    measured: list[float] = []
    before = module.measure_shares
    try:
        module.measure_shares = lambda kl_of, *_: measured.append(kl_of(names))  # type: ignore
        compared(b, why=True)
    finally:
        module.measure_shares = before
    found = compared(mixed(DEMO, b, names, tmp_path / "mixed.gguf"))
    assert measured == [pytest.approx(float(found.kl.mean()), rel=1e-2)]
    assert measured[0] > 0
