"""Breakdowns that are changed, and ranges of files that are mapped, by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.log import schema as s
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.recording.memory.breakdown import (
    MemoryBreakdown,
    MemoryUse,
    mapped_bytes,
    read_breakdown,
)
from llamacpp_instr.recording.memory.plan import MAX_CTX, _breakdowns, check_size
from tests.kit.gguf_files import save
from tests.kit.made_log import encode
from tests.kit.sketched_log import Sketch


def context_of() -> s.Context:
    (found,) = (event for event in Sketch().events if isinstance(event, s.Context))
    return found


def breakdown(*buffers: s.BufferUse, placed: dict[str, str] | None = None) -> MemoryBreakdown:
    tensors = [
        s.Tensor(t=0, model=0, tensor=i, name=name, type="f32", ne=[2], bytes=8, buffer=buffer)
        for i, (name, buffer) in enumerate((placed or {}).items())
    ]
    return read_breakdown(context_of(), buffers, tensors)


def use(buffer: str, model: int = 0, context: int = 0, compute: int = 0) -> s.BufferUse:
    return s.BufferUse(buffer=buffer, model=model, context=context, compute=compute)


def test_uses_are_in_order_and_none_is_empty() -> None:
    found = breakdown(use("GPU", 1, 2, 3), use("CPU", 4, 0, 6), use("CPU_Mapped", 0, 5, 0))
    assert [(of.kind, of.buffer, of.n_bytes) for of in found.uses] == [
        ("weights", "CPU", 4), ("weights", "GPU", 1), ("cache", "CPU_Mapped", 5),
        ("cache", "GPU", 2), ("compute", "CPU", 6), ("compute", "GPU", 3),
    ]  # fmt: skip
    assert (found.n_bytes, found.of_kind("compute"), found.of("cache", "GPU")) == (21, 9, 2)
    assert not found.settings.mmap, "nothing of a model is in the mapped buffer"
    assert breakdown(use("CPU_Mapped", 1)).settings.mmap


def test_a_mapped_file_takes_the_place_of_plain_memory() -> None:
    plan = breakdown(
        use("CPU", 70, 5), use("CPU_REPACK", 9), placed={"a": "CPU", "b": "CPU_REPACK"}
    )
    found = plan.with_mapped_weights(100)
    assert found.settings.mmap
    assert found.uses == [
        MemoryUse("weights", "CPU_Mapped", 100), MemoryUse("weights", "CPU_REPACK", 9),
        MemoryUse("cache", "CPU", 5),
    ]  # fmt: skip
    assert found.buffers_of() == {"a": ["CPU_Mapped"], "b": ["CPU_REPACK"]}
    assert plan.with_mapped_weights(0).of_kind("weights") == 9
    pinned = breakdown(use("GPU_Host", 70, 5), placed={"a": "GPU_Host"}).with_mapped_weights(80)
    assert pinned.uses == [
        MemoryUse("weights", "CPU_Mapped", 80),
        MemoryUse("cache", "GPU_Host", 5),
    ]
    assert pinned.buffers_of() == {"a": ["CPU_Mapped"]}


def test_compute_buffers_have_room_for_both() -> None:
    one = breakdown(use("CPU", 3, 3, 10), use("GPU", 0, 0, 50))
    other = breakdown(use("CPU", 9, 9, 20), use("GPU", 0, 0, 40))
    assert one.with_room_for(other).uses == [
        MemoryUse("weights", "CPU", 3), MemoryUse("cache", "CPU", 3),
        MemoryUse("compute", "CPU", 20), MemoryUse("compute", "GPU", 50),
    ]  # fmt: skip


def test_what_a_device_holds_and_what_it_would_need() -> None:
    """Of two layers, the second is on a device with half of the cache; buffers of a device in the
    machine's memory are the machine's."""
    uses = [
        s.BufferUse(buffer="GPU", device="GPU0", model=8, context=50, compute=7),
        use("GPU_Host", 1, 0, 9), use("CPU_Mapped", 16), use("CPU", 0, 50),
    ]  # fmt: skip
    tensors = [
        s.Tensor(t=0, model=0, tensor=i, name=name, type="f32", ne=[2], bytes=8, buffer=buffer)
        for i, (name, buffer) in enumerate(
            {"token_embd.weight": "CPU_Mapped", "blk.0.w": "CPU_Mapped", "blk.1.w": "GPU"}.items()
        )
    ]
    device = s.DeviceMemory(device="GPU0", total=100, free=64)
    found = read_breakdown(context_of(), uses, tensors, [device])
    assert (found.on("GPU0"), found.gpu_layers) == (65, 1)
    assert found.too_large() == [(device, 65)]
    assert found.layers_of_machine() == {0: 8 + 50}
    in_machine = (of.n_bytes for of in found.uses if s.is_of_machine(of.buffer))
    assert sum(in_machine) == 1 + 9 + 16 + 50


def test_a_file_is_mapped_from_its_first_tensor_to_its_last(tmp_path: Path) -> None:
    """Four tensors of 64 bytes lie one after the other; if there are two parts, each is a range."""
    for n, whole in ((0, 192), (2, 64 + 64)):
        writer = gguf.GGUFWriter(tmp_path / f"m{n}.gguf", "llama", split_max_tensors=n)
        for name in "abcd":
            writer.add_tensor(name, np.zeros(16, np.float32))
        save(writer)
        path = next(iter(sorted(tmp_path.glob(f"m{n}*.gguf"))))
        model = load_model_file(path)
        assert mapped_bytes(model, {"b", "d"}) == whole
        assert mapped_bytes(model, {"b"}) == 64
        assert mapped_bytes(model, {"a", "b"}) == 128
        assert mapped_bytes(model, set()) == 0


@pytest.mark.parametrize(
    ("arch", "name", "n_bytes", "apart"),
    [
        ("gemma4", "per_layer_token_embd.weight", (4 << 30) + 1, True),
        ("gemma4", "per_layer_token_embd.weight", 4 << 30, False),
        ("gemma4", "per_layer_token_embd.weight", 64, False),
        ("gemma4", "token_embd.weight", (4 << 30) + 1, False),
        ("llama", "per_layer_token_embd.weight", (4 << 30) + 1, False),
    ],
)
def test_a_tensor_beyond_four_gib_whose_rows_are_read_on_demand_is_mapped_apart(
    arch: str, name: str, n_bytes: int, apart: bool
) -> None:
    """It lies between two others, of which the second ends 10 GB after the first begins."""
    weights = [
        SimpleNamespace(path=Path("m.gguf"), name=of, offset=offset, n_bytes=size)
        for of, offset, size in (("a", 0, 64), (name, 64, n_bytes), ("b", 10**10 - 64, 64))
    ]
    model: Any = SimpleNamespace(weights=weights, architecture=arch)
    assert mapped_bytes(model, {"a", name, "b"}) == 10**10 + n_bytes * apart


def test_the_breakdown_of_each_context_in_a_log() -> None:
    context = context_of()
    other = s.Context(**{name: getattr(context, name) for name in context.__struct_fields__})
    other.ctx, other.n_ctx = 1, 99
    events: list[s.Event] = [
        *Sketch().events, other,
        s.Memory(t=0, ctx=1, buffers=[use("CPU", 0, 7)]), s.Memory(t=0, ctx=0, buffers=[]),
    ]  # fmt: skip
    one, two = _breakdowns(encode(events))
    assert (one.settings.n_ctx, one.n_bytes) == (99, 7)
    assert (two.settings.n_ctx, two.n_bytes) == (context.n_ctx, 0)


def test_a_context_is_predicted_up_to_a_size() -> None:
    check_size(33_554_432)
    with pytest.raises(UsageError, match="memory is predicted for up to"):
        check_size(MAX_CTX + 1)
