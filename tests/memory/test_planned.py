"""How memory is planned and compared with the machine's, without the library."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from llamacpp_instr import schema as s
from llamacpp_instr.errors import UsageError
from llamacpp_instr.llama.child import ChildEnded
from llamacpp_instr.llama.engine import CACHE_TYPES, Context, ContextOptions
from llamacpp_instr.memory import dry_graph, dry_run, machine, plan
from llamacpp_instr.memory.breakdown import MemoryBreakdown, MemoryUse
from llamacpp_instr.memory.dry_graph import UbatchShape, _dry_graphs, window
from llamacpp_instr.memory.dry_run import MAX_CTX, LoadError
from llamacpp_instr.model.file import load_model_file
from tests.kit.gguf_files import save
from tests.kit.made_log import encode
from tests.kit.sketched_log import Sketch
from tests.memory.test_breakdown import breakdown, context_of, use

MODEL: Any = SimpleNamespace(path=Path("m.gguf"), weights=[])
GB = 10**9


# --- the machine ---


def test_memory_and_swap_are_told_in_kibibytes() -> None:
    meminfo = "MemTotal:       2000 kB\nMemFree:   7 kB\nSwapTotal:  100 kB\nA: b: c\n"
    assert machine._total(meminfo) == 2100 * 1024


def test_a_container_may_have_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(machine, "_LIMITS", (str(first), str(second)))
    installed = machine.machine_memory()
    assert installed is not None
    assert installed >= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    first.write_text("max\n")
    assert machine.machine_memory() == installed
    second.write_text("5000\n")
    assert machine.machine_memory() == 5000
    first.write_text("4000\n")
    assert machine.machine_memory() == 4000
    first.write_text(f"{1 << 62}\n")
    second.unlink()
    assert machine.machine_memory() == installed


def test_systems_other_than_linux_tell_their_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> str:
        raise OSError

    monkeypatch.setattr(machine.Path, "read_text", fails)
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}
    monkeypatch.setattr(machine.os, "sysconf", pages.__getitem__)
    assert machine.machine_memory() == 4096 * 1000
    monkeypatch.setattr(machine.os, "sysconf", fails)
    assert machine.machine_memory() is None


# --- whether a model fits ---


def check(monkeypatch: pytest.MonkeyPatch, there: int | None, *buffers: s.BufferUse) -> None:
    monkeypatch.setattr(plan, "plan_memory", lambda *_: breakdown(*buffers))
    monkeypatch.setattr(plan, "machine_memory", lambda: there)
    plan.check_memory(MODEL, ContextOptions())


def test_a_model_fits_if_the_machine_has_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mapped, and what other devices hold, takes none of it."""
    held = (use("CPU", 1 * GB, 2 * GB, 0), use("CPU_REPACK", 1 * GB), use("GPU", 9 * GB, 9 * GB),
            use("CPU_Mapped", 99 * GB))  # fmt: skip
    check(monkeypatch, 4 * GB, *held)
    check(monkeypatch, None, *held)
    words = re.escape(
        "m.gguf needs 4.0 GB of memory (weights 2.0 GB, cache 2.0 GB), this machine has 3.9 GB; "
        "a smaller context needs less"
    )
    with pytest.raises(UsageError, match=words):
        check(monkeypatch, 39 * GB // 10, *held)
    with pytest.raises(UsageError, match=r"m.gguf needs 1,500.5 GB of memory \(compute 1,500.5 GB"):
        check(monkeypatch, 4 * GB, use("CPU", 0, 0, 15005 * GB // 10))
    with pytest.raises(UsageError, match="needs"):
        check(monkeypatch, 4 * GB - 1, *held)


@pytest.mark.parametrize(
    ("name", "type_", "refused"),
    [
        ("blk.0.ffn_up.weight", "I32", True),
        ("blk.0.ffn_up.weight", "F64", True),
        ("blk.0.ffn_up.weight", "F32", False),
        ("blk.0.ffn_gate_tid2eid.weight", "I32", False),
    ],
)
def test_a_weight_that_ggml_cannot_multiply_is_refused(
    name: str, type_: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indices are looked up."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    numbers = {"I32": np.int32, "F64": np.float64, "F32": np.float32}[type_]
    writer.add_tensor("first", np.zeros(4, np.float32))
    writer.add_tensor(name, np.zeros(4, numbers))
    save(writer)
    asked: list[Any] = []
    monkeypatch.setattr(plan, "plan_memory", lambda *of: asked.append(of) or breakdown())
    model, options = load_model_file(tmp_path / "m.gguf"), ContextOptions()
    if refused:
        with pytest.raises(UsageError, match=f"tensor '{name}' is {type_}, with which llama.cpp"):
            plan.check_memory(model, options)
        assert not asked
    else:
        plan.check_memory(model, options)
        plan.check_memory(model, options, mmap=False)
        assert asked == [(model, options, True), (model, options, False)]


# --- in a child ---


def test_what_ends_the_child_is_an_error_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def call(*of: Any) -> str:
        calls.append(of)
        if of[-1] == "bad":
            raise ChildEnded("it aborted")
        return "made"

    monkeypatch.setattr(plan, "call_in_child", call)
    assert plan.in_a_child(str, MODEL, "good") == "made"
    assert calls == [(2 << 30, str, MODEL, "good")]
    with pytest.raises(LoadError, match=r"llama\.cpp ended the process: it aborted"):
        plan.in_a_child(str, MODEL, "bad")
    options = ContextOptions()
    for mmap in ((), (True,), (False,)):
        plan.plan_memory(MODEL, options, *mmap)
        assert calls[-1][1:] == (dry_run.dry_run, MODEL, options, mmap != (False,))


def planned_again(
    monkeypatch: pytest.MonkeyPatch, measured: int, usual: int, whole: int
) -> tuple[int, int]:
    """The cache that is predicted for a measured one, of sizes without and with `swa_full`; and the
    number of predictions."""
    asked: list[bool] = []

    def call(function: object, _: object, settings: Any) -> MemoryBreakdown:
        assert function is dry_run.dry_run_again
        asked.append(settings.swa_full)
        return breakdown(use("CPU", 1, whole if settings.swa_full else usual))

    monkeypatch.setattr(plan, "in_a_child", call)
    found = plan.plan_memory_again(MODEL, breakdown(use("CPU", 1, measured)))
    assert asked == [False, True][: len(asked)]
    return found.of_kind("cache"), len(asked)


def test_a_cache_has_the_whole_context_if_it_then_has_the_measured_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert planned_again(monkeypatch, measured=5, usual=5, whole=9) == (5, 1)
    assert planned_again(monkeypatch, measured=9, usual=5, whole=9) == (9, 2)
    assert planned_again(monkeypatch, measured=7, usual=5, whole=9) == (5, 2)


# --- dry runs ---


class FakeContext:
    """Notes its options; a model has a memory or not."""

    handle = 8
    has_memory = True
    made: list[Any]

    def __init__(self, _: object, options: Any, embed_tokens: int = 0) -> None:
        self.made.append((options, embed_tokens))
        self.memory = 1 if self.has_memory else 0

    def __enter__(self) -> FakeContext:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Options and embeddings of each context."""
    found: list[Any] = []
    fake = type("Fake", (FakeContext,), {"made": found, "has_memory": True})
    for module in (dry_run, dry_graph):
        monkeypatch.setattr(module, "Context", fake)
    monkeypatch.setattr(dry_run, "_RecordedContext", fake)
    return found


def logged(monkeypatch: pytest.MonkeyPatch, module: Any, content: bytes, levels: list[str]) -> None:
    """A dry run writes this log."""

    @contextlib.contextmanager
    def log(_: object, level: str) -> Any:
        levels.append(level)
        yield "dry", bytearray(content)

    monkeypatch.setattr(module, "dry_context_log", log)


def events_of(*compute: int) -> bytes:
    """Contexts with compute buffers of these sizes; one of three weights is repacked."""
    weights = [
        s.Tensor(t=0, model=0, tensor=i, name=name, type="f32", ne=[16], bytes=64, buffer=buffer)
        for i, (name, buffer) in enumerate((("a", "CPU"), ("b", "CPU_REPACK"), ("c", "CPU")))
    ]
    model = [event for event in Sketch().events if isinstance(event, s.Model)]
    contexts = [
        event
        for size in compute
        for event in (context_of(), s.Memory(t=0, ctx=0, buffers=[use("CPU", 128, 5, size)]))
    ]
    return encode([*model, *weights, *contexts])


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The levels of the logs; the last context needs 30 bytes to compute, the one before 40."""
    found: list[str] = []
    logged(monkeypatch, dry_run, events_of(99, 40, 30), found)
    return found


def test_a_dry_run_measures_a_context_for_single_tokens_and_the_one_that_is_asked_for(
    made: list[Any], levels: list[str]
) -> None:
    options = ContextOptions(ctx=MAX_CTX, ubatch=32)
    found = dry_run.dry_run(MODEL, options, mmap=False)
    assert made == [(options, 0), (replace(options, ubatch=1), 0), (options, 0)]
    assert [(of.kind, of.n_bytes) for of in found.uses] == [
        ("weights", 128), ("cache", 5), ("compute", 40)
    ]  # fmt: skip
    assert levels == ["minimal"]


def test_a_model_without_memory_gets_a_context_for_embeddings(
    made: list[Any], levels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run.Context, "has_memory", False)
    dry_run.dry_run(MODEL, ContextOptions(), mmap=False)
    assert [embeds for _, embeds in made] == [0, 1, 1]
    assert levels == ["minimal"]


@pytest.mark.usefixtures("made", "levels")
def test_what_is_mapped_is_the_range_of_the_weights_that_are_used_in_place(tmp_path: Path) -> None:
    """`a` and `c` of three weights of 64 bytes: all 192."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name in "abc":
        writer.add_tensor(name, np.zeros(16, np.float32))
    save(writer)
    found = dry_run.dry_run(load_model_file(tmp_path / "m.gguf"), ContextOptions(), mmap=True)
    assert found.uses[0] == MemoryUse("weights", "CPU_Mapped", 192)
    assert found.settings.mmap


def test_a_context_beyond_33_million_tokens_is_refused_before_the_dry_run(
    made: list[Any], levels: list[str]
) -> None:
    too_many = 33_554_433
    with pytest.raises(UsageError, match="33,554,433 tokens; memory is predicted for up to 33,554"):
        dry_run.dry_run(MODEL, ContextOptions(ctx=too_many), mmap=True)
    settings = replace(breakdown().settings, n_ctx=too_many)
    with pytest.raises(UsageError, match="33,554,433 tokens"):
        dry_run.dry_run_again(MODEL, settings)
    dry_run.dry_run_again(MODEL, replace(settings, n_ctx=too_many - 1))
    assert (len(made), levels) == (2, ["minimal"])


def test_a_recorded_context_is_made_again_also_for_single_tokens_of_its_sequences(
    made: list[Any], levels: list[str]
) -> None:
    settings = replace(breakdown().settings, n_ubatch=64, n_seq_max=3, swa_full=True)
    found = dry_run.dry_run_again(MODEL, settings)
    assert [(of.n_ubatch, embeds) for of, embeds in made] == [(3, 0), (64, 0)]
    assert found.settings.swa_full
    assert found.of_kind("compute") == 40
    assert levels == ["minimal"]


def test_a_recorded_context_has_the_settings_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Context, "__init__", lambda *_: None)
    settings = replace(
        breakdown().settings, type_k="q8_0", type_v="f32", kv_unified=True, flash_attn=True,
        n_ctx=512, n_batch=64, n_ubatch=32, n_seq_max=2,
    )  # fmt: skip
    context: Any = dry_run._RecordedContext(MODEL, settings)
    context.api = SimpleNamespace(llama_context_default_params=SimpleNamespace)
    assert context._params(ContextOptions(), 0) == SimpleNamespace(
        n_ctx=512, n_batch=64, n_ubatch=32, n_seq_max=2, embeddings=False, kv_unified=True,
        swa_full=False, type_k=CACHE_TYPES["q8_0"], type_v=CACHE_TYPES["f32"], flash_attn_type=1,
    )  # fmt: skip


# --- graphs ---


@pytest.mark.parametrize(
    ("tokens", "past", "cells"), [(1, 0, 256), (1, 255, 256), (1, 256, 512), (256, 1, 512)]
)
def test_a_window_is_a_multiple_of_256_cells(tokens: int, past: int, cells: int) -> None:
    assert window(UbatchShape(tokens, past)) == cells


@pytest.fixture
def reserved(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The graphs of ubatches, the contexts, and what was reserved in them."""
    graph = next(event for event in Sketch().events if isinstance(event, s.Graph))
    other = s.Note(t=0, name="graph", data={})
    asked: list[Any] = []
    library = SimpleNamespace(reserve_graph=lambda *of: asked.append(of))
    monkeypatch.setattr(dry_graph.native, "load", lambda: library)
    levels: list[str] = []
    logged(monkeypatch, dry_graph, encode([*Sketch().events[:2], graph, other, graph]), levels)

    def run(options: ContextOptions, *ubatches: UbatchShape) -> tuple[list[Any], list[Any]]:
        assert _dry_graphs(MODEL, options, ubatches) == [graph, graph]
        assert levels == ["verbose"]
        return made, asked

    return run


def test_the_context_of_a_graph_is_as_large_as_its_window(reserved: Callable[..., Any]) -> None:
    options = ContextOptions(ctx=9999, threads=3)
    made, asked = reserved(options, UbatchShape(1, 300), UbatchShape(5, outputs=2))
    assert made == [
        (replace(options, ctx=512, batch=1, ubatch=1), 0),
        (replace(options, ctx=256, batch=5, ubatch=5), 0),
    ]
    assert asked == [(8, 1, 1, 1), (8, 5, 1, 2)]


def test_a_batch_is_at_least_as_large_as_its_ubatch(reserved: Callable[..., Any]) -> None:
    made, _ = reserved(ContextOptions(batch=64, ubatch=3), UbatchShape(5), UbatchShape(2))
    assert [(of.batch, of.ubatch) for of, _ in made] == [(64, 5), (64, 3)]


def test_a_model_without_memory_sees_one_ubatch_whose_tokens_all_have_outputs(
    reserved: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_graph.Context, "has_memory", False)
    made, asked = reserved(ContextOptions(), UbatchShape(5, outputs=2))
    assert [embeds for _, embeds in made] == [0, 5]
    assert asked == [(8, 5, 1, 5)]


@pytest.mark.parametrize(
    "shape",
    [UbatchShape(0), UbatchShape(1, -1), UbatchShape(2, outputs=0), UbatchShape(2, outputs=3)],
)
def test_impossible_ubatches_are_refused(shape: UbatchShape) -> None:
    with pytest.raises(UsageError, match="is not a ubatch"):
        _dry_graphs(MODEL, ContextOptions(), [UbatchShape(2, outputs=2), shape])


def test_a_ubatch_far_behind_others_is_refused() -> None:
    with pytest.raises(UsageError, match="memory is predicted for up to"):
        _dry_graphs(MODEL, ContextOptions(), [UbatchShape(1, MAX_CTX)])
