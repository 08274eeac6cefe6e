"""A model that a program loads without its weights, before the one that its user sees, is in no
session."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import load_parts, load_session
from tests.kit.made_log import encode
from tests.kit.sketched_log import Sketch

ABOUT_MODELS = (s.Model, s.Tensor, s.Context, s.Memory)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two steps of a model; the same model was loaded dry before."""
    sketch = Sketch()
    sketch.weight(64, "f16", "CPU")
    buffer = s.BufferUse(buffer="CPU", model=64, context=32, compute=16)
    sketch.events.insert(-1, s.Memory(t=0, ctx=0, buffers=[buffer], rss=1))
    at = next(i for i, event in enumerate(sketch.events) if isinstance(event, s.Model))
    dry: list[s.Event] = []
    for event in sketch.events:
        if isinstance(event, s.Context | s.Memory):
            dry.append(replace(event, ctx=event.ctx + 7))
        elif isinstance(event, s.Model | s.Tensor):
            dry.append(replace(event))
    for event in dry:
        if isinstance(event, s.Model | s.Tensor | s.Context):
            event.model += 7
        if isinstance(event, s.Model):
            event.dry = True
    dry.sort(key=lambda event: ABOUT_MODELS.index(type(event)))  # type: ignore[arg-type]
    sketch.events[at:at] = dry
    sketch.step(900, 6, sampled=10, ops=([400, 50], [0, 0]))
    sketch.step(900, sampled=10, ops=([400, 50], [0, 0]))
    path = tmp_path / "a.log"
    path.write_bytes(encode(sketch.events))
    return path


def test_a_session_has_the_model_that_its_user_sees(log: Path) -> None:
    for session in (load_session(log), *load_parts(log, part_rows=1)):
        assert list(session.models) == list(session.contexts) == [0]
        assert {tensor.model for tensor in session.tensors} <= {0}
        assert {event.ctx for event in session.memory} <= {0}
    assert len(load_session(log).tensors) == len(load_session(log).memory) == 1
