"""One side of a comparison, and the charts of several: each has all that belongs to it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses import compare, weights
from llamacpp_instr.converters.analyses.compare import Candidate, recorded_memory, recorded_model
from llamacpp_instr.converters.analyses.memory import StoredModel, StoredTensor
from llamacpp_instr.converters.analyses.step_times import median_of_sessions
from llamacpp_instr.lab.weights.figures import Sums, WeightError
from llamacpp_instr.log import schema as s
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.report.page import Figure
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch


def tensor(name: str, n_bytes: int) -> StoredTensor:
    return StoredTensor(name, "F16", (8,), n_bytes)


def model_of(*tensors: StoredTensor) -> StoredModel:
    return StoredModel("m", "llama", list(tensors))


def error_of(name: str, layer: int, x2: float, e2: float) -> WeightError:
    kind = BY_NAME["Q8_0"]
    sums = Sums(1, x2, x2, e2)
    return WeightError(name, layer, "w", kind, kind, 1, 1 << 20, sums, *[0.0] * 5, 0, 0.0, 0)


def session(path: Path, ns: int, wall: int = 10**15) -> Any:
    sketch = Sketch()
    start = sketch.events[0]
    assert isinstance(start, s.SessionStart)
    sketch.events[0] = replace(start, wall=wall)
    sketch.step(ns, tokens=4)
    return session_of(path, sketch.events)


def test_a_log_without_a_model_is_refused(tmp_path: Path) -> None:
    of = session(tmp_path / "a.log", 100)
    assert recorded_model(of).model == 0
    of.models.clear()
    with pytest.raises(UsageError, match="recorded 0 models; a comparison needs a log of one"):
        recorded_model(of)


def test_the_memory_is_that_of_the_last_event(tmp_path: Path) -> None:
    of = session(tmp_path / "a.log", 100)
    assert recorded_memory(of) is None
    for context in (10, 20, 30):
        use = s.BufferUse(buffer="CPU", context=context)
        of.memory.append(s.Memory(t=0, ctx=0, buffers=[use]))
    found = recorded_memory(of)
    assert found is not None
    assert found.of_kind("cache") == 30


def test_sessions_are_in_order_of_time(tmp_path: Path) -> None:
    """The rate is the median of the sessions' rates."""
    sessions = [
        session(tmp_path / f"{i}.log", ns, wall)
        for i, (ns, wall) in enumerate(((400, 3), (100, 1), (200, 2)))
    ]
    of = Candidate("a", model_of(), sessions=sessions)
    assert [times.session.start.wall for times in of.times] == [1, 2, 3]
    assert of.tokens_per_second("prefill") == pytest.approx(4e9 / 200)
    assert of.phases() == {"prefill"}


def test_errors_of_several_weights_are_pooled() -> None:
    errors = {"a": error_of("a", 0, 600, 1), "b": error_of("b", 0, 400, 9)}
    of = Candidate("a", model_of(), errors=errors)
    assert of.sqnr_db(["a", "b", "c"]) == pytest.approx(10 * math.log10(1000 / 10))
    assert of.sqnr_db([]) is None
    assert Candidate("a", model_of(), is_reference=True).sqnr_db(["a"]) == math.inf


def test_the_time_of_a_side_in_turns_is_the_geometric_mean_of_its_sessions() -> None:
    found = median_of_sessions([100.0, 400.0])
    assert found.value == pytest.approx(200)


# --- charts ---


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of the charts of lines and points, which are not drawn."""
    found: list[tuple[Any, ...]] = []
    for module in (compare, weights):
        monkeypatch.setattr(module, "lines_by_layer", lambda *of: found.append(of))
    monkeypatch.setattr(weights, "scatter_size_error", lambda *of: found.append(of))
    return found


def test_bits_by_layer_have_gaps_where_a_model_lacks_a_layer(
    drawn: list[tuple[Any, ...]],
) -> None:
    """What is in no layer comes last, and so does the reference, which has no error."""
    a = model_of(tensor("blk.0.w", 16), tensor("out.weight", 32))
    b = model_of(tensor("blk.0.w", 8), tensor("blk.2.w", 4))
    reference = Candidate("A", a, is_reference=True)
    compare.draw_comparison([reference, Candidate("B", b)])
    ((title, _, names, bits),) = drawn
    assert title == "Bits per weight by layer"
    assert names == ["0", "2", names[-1]]
    assert list(bits) == ["B", "A"]
    assert bits == {"A": [16, None, 32], "B": [8, 4, None]}


def test_without_steps_no_speed_is_drawn(tmp_path: Path) -> None:
    none = Candidate("none", model_of())
    assert not any(isinstance(chart, Figure) for chart in compare.draw_comparison([none]))
    measured = Candidate("some", model_of(), sessions=[session(tmp_path / "a.log", 100)])
    figure = compare.draw_comparison([none, measured])[0]
    assert isinstance(figure, Figure)
    assert figure.title == "Speed, median step"
    assert "prefill, tokens/s" in figure.markup
    assert "decode, tokens/s" not in figure.markup
    assert ("<dt>some</dt>" in figure.markup, "<dt>none</dt>" in figure.markup) == (True, False)


def test_errors_by_layer_and_over_the_size(drawn: list[tuple[Any, ...]]) -> None:
    """Decibels are ten times the logarithm of the ratio of the squares."""
    a = [error_of("x", 0, 1000, 10), error_of("y", 0, 1000, 10), error_of("z", -1, 100, 1)]
    b = [error_of("x", 0, 1000, 1), error_of("y", 3, 1000, 100)]
    weights.draw_errors({"A": a, "B": b})
    (_, _, names, lines), (_, _, _, points) = drawn
    assert names[:2] == ["0", "3"]
    assert lines["A"][0::2] == pytest.approx([20, 20])
    assert lines["B"][:2] == pytest.approx([30, 10])
    assert [(of.name, of.x, of.y) for of in points] == [
        ("A", 3, pytest.approx(math.sqrt(21 / 2100))),
        ("B", 2, pytest.approx(math.sqrt(101 / 2000))),
    ]
    drawn.clear()
    assert weights.draw_errors({}) == []
    assert drawn == []


def test_layers_are_in_order_and_no_layer_is_last() -> None:
    assert weights.layers_of([3, -1, 0, 3, 10, 1]) == [0, 1, 3, 10, -1]
