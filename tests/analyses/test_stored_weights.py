"""A model's tensors from its file and from a log, and whether the file is still the log's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.converters.analyses.memory import (
    StoredModel,
    StoredTensor,
    recorded_file,
    stored_in_file,
    stored_in_log,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session
from llamacpp_instr.model.file import load_model_file
from tests.kit.block_models import half, rows_of, write_blocks
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return write_blocks(tmp_path / "models" / "m.gguf", {
        "blk.0.up.weight": ("Q8_0", rows_of([half(1) + bytes(32)] * 2, 1)),
        "blk.3.norm.weight": ("F32", np.ones(8, np.float32)),
        "out.weight": ("F32", np.ones((1, 4), np.float32)),
    })  # fmt: skip


def log_of(
    path: Path, of: Path | str, change: Callable[[list[s.Tensor]], None] = lambda _: None
) -> Session:
    """A log of the model, with the tensors of the fixture."""
    tensors = [
        s.Tensor(t=0, model=0, tensor=i, name=name, type=type_, ne=ne, bytes=n, buffer="CPU",
                 layer=0)
        for i, (name, type_, ne, n) in enumerate([
            ("blk.0.up.weight", "q8_0", [32, 2], 68), ("blk.3.norm.weight", "f32", [8], 32),
            ("out.weight", "f32", [4, 1, 1], 16),
        ])
    ]  # fmt: skip
    change(tensors)
    events = Sketch().events
    for event in events:
        if isinstance(event, s.Model):
            event.path = str(of)
    return session_of(path, [*events, *tensors])


def test_a_file_and_its_log_have_the_same_tensors(model: Path, tmp_path: Path) -> None:
    file = load_model_file(model)
    stored = stored_in_file(file)
    assert stored.name == "m.gguf"
    assert stored.file_size == model.stat().st_size
    assert stored.n_elements == 64 + 8 + 4
    assert stored.n_bytes == 68 + 32 + 16
    assert stored.span is not None
    assert stored.n_bytes <= stored.span <= stored.file_size
    assert [of.name for of in stored.by_layer[-1]] == ["out.weight"]
    assert stored.by_layer.keys() == {0, 3, -1}
    session = log_of(tmp_path / "a.log", "C:\\models\\m.gguf")
    logged = stored_in_log(session, session.models[0], None)
    assert (logged.name, logged.description) == ("m.gguf", "llama, F16")
    assert [(of.name, of.type, of.n_bytes) for of in logged.tensors] == [
        (of.name, of.type, of.n_bytes) for of in stored.tensors
    ]
    assert (logged.file_size, logged.span) == (None, None)
    with_file = stored_in_log(session, session.models[0], file)
    assert (with_file.name, with_file.file_size) == ("m.gguf", stored.file_size)
    assert with_file.tensors == logged.tensors
    assert StoredModel("m", "", [StoredTensor("t", "F32", (2, 3), 24)]).n_elements == 6


def test_a_tensor_that_was_loaded_twice_is_listed_once(model: Path, tmp_path: Path) -> None:
    session = log_of(tmp_path / "a.log", model, lambda of: of.append(
        s.Tensor(t=0, model=0, tensor=3, name="out.weight", type="f32", ne=[4], bytes=16,
                 buffer="CPU_REPACK", layer=-1)
    ))  # fmt: skip
    assert len(stored_in_log(session, session.models[0], None).tensors) == 3


def test_the_file_of_a_log_has_its_tensors(model: Path, tmp_path: Path) -> None:
    """Dimensions of 1 do not matter."""
    session = log_of(tmp_path / "a.log", model)
    assert recorded_file(session, session.models[0]).path == model


@pytest.mark.parametrize(
    ("at", "change"),
    [(0, {"type": "q4_0"}), (0, {"bytes": 69}), (0, {"ne": [2, 32]}), (1, {"ne": [4, 2]}),
     (1, {"name": "gone.weight"}), (2, {"bytes": 15})],
    ids=str,
)  # fmt: skip
def test_a_file_that_has_changed_is_refused(
    at: int, change: dict[str, object], model: Path, tmp_path: Path
) -> None:
    def changed(tensors: list[s.Tensor]) -> None:
        for name, value in change.items():
            setattr(tensors[at], name, value)

    session = log_of(tmp_path / "a.log", model, changed)
    name = session.tensors[at].name
    with pytest.raises(UsageError, match=f"is no longer the model of the log: {name} differs"):
        recorded_file(session, session.models[0])


def test_a_file_that_was_moved_is_looked_for_beside_the_log(model: Path, tmp_path: Path) -> None:
    session = log_of(model.parent / "a.log", "/nowhere/m.gguf")
    assert recorded_file(session, session.models[0]).path == model
    # one that is still in its place is not
    other = write_blocks(tmp_path / "m.gguf", {"t": ("F32", np.ones(4, np.float32))})
    session = log_of(tmp_path / "b.log", model)
    assert other.exists()
    assert recorded_file(session, session.models[0]).path == model
    elsewhere = log_of(tmp_path / "models" / "c.log", "/nowhere/z.gguf")
    for path in ("/nowhere/z.gguf", "/" + "x" * 5000, "a\0b"):
        elsewhere.models[0].path = path
        with pytest.raises(InstrError):
            recorded_file(elsewhere, elsewhere.models[0])
