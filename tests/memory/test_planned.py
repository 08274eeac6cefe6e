"""How memory is planned and compared with the machine's."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from llamacpp_instr.base import machine
from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama.crashes import ChildEnded
from llamacpp_instr.llama.devices import ANYWHERE, Placement
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.log import schema as s
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.recording.memory import plan
from llamacpp_instr.recording.memory.breakdown import MemoryBreakdown, read_breakdown
from llamacpp_instr.recording.memory.plan import (
    MAX_CTX,
    LoadError,
    UbatchShape,
    _dry_graphs,
    window,
)
from tests.kit.gguf_files import save
from tests.memory.test_breakdown import breakdown, context_of, use

MODEL: Any = SimpleNamespace(path=Path("m.gguf"), weights=[])
GB = 10**9


# --- the machine ---


def test_memory_and_swap_are_read_in_kibibytes() -> None:
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


@pytest.mark.parametrize(("free", "layers"), [(399, 3), (400, None), (99, 0), (250, 2)])
def test_a_device_that_lacks_memory_is_a_warning_with_the_layers_that_fit(
    monkeypatch: pytest.MonkeyPatch, free: int, layers: int | None
) -> None:
    """Of three layers and the output, each takes 100 bytes of a device."""

    def planned(_: object, __: object, ___: object, placed: Placement) -> MemoryBreakdown:
        n = 4 if placed.gpu_layers is None else placed.gpu_layers
        on_device = s.BufferUse(buffer="GPU", device="GPU0", model=90 * n, context=10 * n)
        has = s.DeviceMemory(device="GPU0", total=1000, free=free)
        return read_breakdown(context_of(), [on_device], [], [has])

    monkeypatch.setattr(plan, "plan_memory", planned)
    weights = [SimpleNamespace(layer=i, type=SimpleNamespace(name="F16")) for i in (-1, 0, 1, 2)]
    model: Any = SimpleNamespace(path=Path("m.gguf"), weights=weights)
    found = plan.check_memory(model, ContextOptions())
    sizes = "needs 0.0 GB on GPU0, which has 0.0 GB free"
    words = f"warning: m.gguf {sizes}; --gpu-layers {layers} needs less"
    assert found == ([] if layers is None else [words])


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
    """Indices are not multiplied but looked up."""
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
        plan.check_memory(model, options, mmap=False, placement=Placement(gpu_layers=1))
        assert asked == [
            (model, options, True, ANYWHERE),
            (model, options, False, Placement(gpu_layers=1)),
        ]


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
        assert calls[-1][1:] == (plan.dry_run, MODEL, options, mmap != (False,), ANYWHERE)


def planned_again(
    monkeypatch: pytest.MonkeyPatch, measured: int, usual: int, whole: int
) -> tuple[int, int]:
    """The cache that is predicted for a measured one, of sizes without and with `swa_full`; and the
    number of predictions."""
    asked: list[bool] = []

    def call(function: object, _: object, settings: Any, placed: Placement) -> MemoryBreakdown:
        assert function is plan.dry_run_again
        assert placed == Placement(device=["none"]), "no device was there"
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


# --- graphs ---


@pytest.mark.parametrize(
    ("tokens", "past", "cells"), [(1, 0, 256), (1, 255, 256), (1, 256, 512), (256, 1, 512)]
)
def test_a_window_is_a_multiple_of_256_cells(tokens: int, past: int, cells: int) -> None:
    assert window(UbatchShape(tokens, past)) == cells


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
