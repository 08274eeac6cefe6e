"""What is recorded to measure kernels."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from llamacpp_instr.base.machine import drop_cached
from llamacpp_instr.log.session import load_session
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.prediction import recorded
from llamacpp_instr.prediction.recorded import (
    CONTEXT,
    SUBJECTS,
    Run,
    Shape,
    Subject,
    has_moved,
    record_runs,
    record_subjects,
    write_random_layers,
)


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda of: of.name)
def test_the_models_are_whole_blocks_of_each_type_and_hold_their_runs(subject: Subject) -> None:
    shape = subject.shape
    assert shape.width % shape.heads == shape.heads % shape.kv_heads == 0
    assert shape.head_length in (64, 128, 256)
    for type_ in subject.types:
        for length in (shape.width, shape.feed_forward):
            assert length % BY_NAME[type_].block == 0
    assert bool(shape.experts) == bool(shape.used)
    assert shape.used < max(shape.experts, 1)
    for run in subject.runs:
        assert run.times > 1, "the first of each builds its graph"
        assert run.past + run.tokens * run.times <= CONTEXT or run.tokens > 1
        assert run.past + run.tokens <= CONTEXT
        assert run.tokens & (run.tokens - 1) == 0, "a power of two"
    assert Run(1, subject.runs[0].times) == subject.runs[0], "a decode comes first"


def test_subjects_have_names_of_their_own() -> None:
    names = [subject.name for subject in SUBJECTS]
    assert len(set(names)) == len(names)
    assert [of.name for of in SUBJECTS if not of.repack] == ["plain"]
    heads = {of.name: of.shape.width // of.shape.heads for of in SUBJECTS}
    for name, length in heads.items():
        assert not name.startswith("attention-") or name == f"attention-{length}"


def test_threads_that_wait_much_longer_or_less_long_have_moved() -> None:
    """0.27 and 0.57 us are what two virtual CPUs need on neighbouring cores and on distant ones."""
    near, far = {2: 270.0}, {2: 570.0}
    assert has_moved(near, far)
    assert has_moved(far, near)
    assert not has_moved(near, {2: 300.0})
    assert not has_moved({}, near), "of one thread"


def test_what_was_recorded_while_threads_moved_is_recorded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first recording is disturbed, and so is each from the third on: there are three tries."""
    waits = iter([270.0, 570.0, 280.0, 560.0, 560.0, 560.0])
    runs: list[int] = []
    monkeypatch.setattr(recorded, "barriers_of", lambda _threads: {2: next(waits)})
    monkeypatch.setattr(recorded, "record_runs", lambda _model, _log, n, *_: runs.append(n))
    monkeypatch.setattr(recorded, "write_random_layers", lambda path, *_: path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").touch()
    subjects = [Subject(name, SUBJECTS[0].shape, ("F16",), (Run(1, 2),)) for name in ("one", "two")]
    found = [(of.model, len(runs)) for of in record_subjects(tmp_path, [2], subjects)]
    assert found == [("one", 2), ("two", 5)]


@pytest.mark.native
def test_a_run_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    model = write_random_layers(tmp_path / "a.gguf", Shape(256, 768, 4, 2), ["F16"])
    runs = (Run(1, 2), Run(1, 2, past=4), Run(2, 2, past=10), Run(2, 2), Run(1, 1, past=1))
    record_runs(model, tmp_path / "a.log", 1, runs)
    steps = load_session(tmp_path / "a.log").steps.tuples("pos", "n_tokens")
    assert list(steps) == [
        (0, 1), (1, 1), (2, 2), (4, 1), (5, 1), (6, 4), (10, 2), (10, 2), (0, 2), (0, 2), (0, 1),
        (1, 1),
    ]  # fmt: skip


@pytest.mark.native
def test_blocks_have_as_many_scales_as_those_of_real_models(tmp_path: Path) -> None:
    """SmolLM2-135M in Q8_0 has 540 to 1,080 in a tensor, in 148 to 276 lines of ggml's table."""
    model = write_random_layers(tmp_path / "a.gguf", Shape(576, 1536, 9, 3), ["Q8_0"] * 2)
    (tensor,) = (of for of in GGUFReader(model).tensors if of.name == "blk.1.ffn_up.weight")
    blocks = np.asarray(tensor.data).reshape(-1, 34)
    scales = np.unique(np.ascontiguousarray(blocks[:, :2]).view(np.uint16))
    assert 500 < len(scales) < 1100
    assert 140 < len(np.unique(scales // 16)) < 280


@pytest.mark.native
def test_a_model_is_read_from_its_disk_and_not_from_what_was_just_written(tmp_path: Path) -> None:
    model = write_random_layers(tmp_path / "a.gguf", Shape(256, 768, 4, 2), ["F16"])
    if cached_pages(model):  # a file system in memory has nowhere else to read from
        drop_cached(model)
        assert cached_pages(model) == -(-model.stat().st_size // mmap.PAGESIZE)
    else:
        model.read_bytes()
        assert cached_pages(model) > 0


def cached_pages(path: Path) -> int:
    """Pages of a file that are in memory: mincore(2)."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        found = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(pages)), found) == 0
        return sum(of & 1 for of in found)


@pytest.mark.native
def test_a_model_with_a_window_is_a_gemma(tmp_path: Path) -> None:
    shape = Shape(512, 1536, 2, 1, window=256, head=256)
    reader = GGUFReader(write_random_layers(tmp_path / "a.gguf", shape, ["F16"]))
    of = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert reader.fields["general.architecture"].contents() == "gemma3"
    assert reader.fields["gemma3.attention.sliding_window"].contents() == 256
    assert of["blk.0.attn_q.weight"] == [512, 2 * 256]
    assert of["blk.0.attn_output.weight"] == [2 * 256, 512]
    assert of["blk.0.attn_k_norm.weight"] == [256]
    assert "output.weight" not in of, "the embedding is also the output"
