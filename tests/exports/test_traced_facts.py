"""What belongs to no step in a trace: models, memory, caches, marks, tokens, values, bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.exports.perfetto import Options, stream
from llamacpp_instr.converters.exports.perfetto.kernels import KernelSlices
from llamacpp_instr.converters.exports.perfetto.packets import Packets
from llamacpp_instr.converters.exports.traced import layer_spans
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.graph.kernels import KernelWork
from llamacpp_instr.log.graph.timeline import Selection, plan_timeline
from llamacpp_instr.log.session import load_session
from tests.exports import test_chrome as chrome
from tests.exports.test_perfetto import Back, convert
from tests.exports.test_traced_steps import FACTS, T, begin, drawn, end, of_category, spans, token
from tests.kit.made_log import encode

EVERY_EVENT = Path(__file__).parent.parent / "fixtures" / "every-event.log"
WITHOUT_CONTEXT = [e for e in FACTS if not isinstance(e, s.Context)]
STEP: list[s.Event] = [begin(0, 0), end(100, 0)]


@pytest.mark.parametrize(
    ("facts", "tracks"), [(FACTS, ["session"]), (WITHOUT_CONTEXT, ["messages"])]
)
def test_a_model_is_drawn_once_with_its_first_context_or_without_one(
    tmp_path: Path, facts: list[s.Event], tracks: list[str]
) -> None:
    back = Back(convert(tmp_path / "a.log", encode(facts))[0])
    assert [of["track"] for of in of_category(back, "model")] == tracks


def test_a_model_is_not_drawn_among_chosen_steps(tmp_path: Path) -> None:
    back, _ = drawn(tmp_path, STEP, Options(selection=Selection(steps=(0, 0))))
    assert of_category(back, "model") == []


def test_memory_of_a_process_that_is_not_known_is_not_drawn(tmp_path: Path) -> None:
    use = s.BufferUse(buffer="CPU", model=5, context=6, compute=7)
    events = [s.Memory(t=T + t, ctx=0, buffers=[use], rss=rss) for t, rss in ((0, 0), (10, 99))]
    back, _ = drawn(tmp_path, events)
    assert [(t - T, n) for name, t, n in back.counters if name == "resident memory"] == [(10, 99)]
    assert [(name, n) for name, t, n in back.counters if t == T] == [
        ("CPU model", 5), ("CPU context", 6), ("CPU compute", 7),
    ]  # fmt: skip


def test_the_memory_of_a_device_is_that_of_all_contexts(tmp_path: Path) -> None:
    """Their common weights count once."""
    use = s.BufferUse(buffer="GPU", device="GPU0", model=5, context=6, compute=7)
    free = s.DeviceMemory(device="GPU0", total=99, free=40)
    events: list[s.Event] = [
        s.Memory(t=T, ctx=0, buffers=[use], devices=[free]),
        s.Memory(t=T + 9, ctx=1, buffers=[use], devices=[replace(free, free=20)]),
    ]  # fmt: skip
    back, _ = drawn(tmp_path, events)
    expected = [("in use", 0, 18), ("free", 0, 40), ("in use", 9, 31), ("free", 9, 20)]
    assert [(name, t - T, n) for name, t, n in back.counters if name.startswith("GPU0 ")] == [
        (f"GPU0 {what}", t, n) for what, t, n in expected
    ]
    of_chrome = chrome.convert(tmp_path / "b.log", encode([*FACTS, *events]))
    assert [
        (e["name"], e["args"]["value"]) for e in of_chrome if e["name"].startswith("memory of ")
    ] == [(f"memory of GPU0 {what}", n) for what, _, n in expected]


def kv(t: int, op: str, **more: Any) -> s.Kv:
    fields = {"ctx": 0, "step": -1, "used": 3, "size": 8, "bytes": 96, "n_kv": 8, **more}
    return s.Kv(t=T + t, op=op, **fields)


def test_changes_of_a_cache_are_instants_and_its_use_is_counted(tmp_path: Path) -> None:
    events: list[s.Event] = [
        kv(0, "apply"), kv(10, "seq_rm", seq=0, p0=1, p1=-1, used=1), kv(20, "apply", cache=1),
    ]  # fmt: skip
    back, _ = drawn(tmp_path, events)
    assert spans(back, "kv") == [("KV seq_rm", 10, 10)]
    assert of_category(back, "kv")[0]["args"] == {"seq": 0, "p0": 1, "p1": -1}
    assert [(name, t - T, n) for name, t, n in back.counters] == [
        ("KV cells", 0, 3), ("KV bytes", 0, 96), ("KV cells", 10, 1), ("KV bytes", 10, 96),
        ("KV cells of cache 1", 20, 3), ("KV bytes of cache 1", 20, 96),
    ]  # fmt: skip
    back, _ = drawn(tmp_path, [*STEP, *events], Options(selection=Selection(steps=(0, 0))))
    assert not [name for name, *_ in back.counters if name.startswith("KV")]
    of_chrome = chrome.convert(tmp_path / "b.log", encode([*FACTS, *events]))
    counted = [(e["name"], e["args"]["value"]) for e in of_chrome if e["ph"] == "C"]
    assert counted == [
        ("KV cells", 3), ("KV bytes", 96), ("KV cells", 1), ("KV bytes", 96),
        ("KV cells of cache 1", 3), ("KV bytes of cache 1", 96),
    ]  # fmt: skip


def mark(t: int, number: int, phase: Any, name: str = "turn") -> s.Mark:
    return s.Mark(t=T + t, mark=number, name=name, phase=phase, thread=7)


def test_marks_are_spans_and_instants_and_one_that_is_open_ends_with_the_log(
    tmp_path: Path,
) -> None:
    events: list[s.Event] = [
        mark(0, 0, "begin"), mark(5, 1, "instant", "now"), mark(10, 2, "begin", "other"),
        mark(20, 0, "end"), s.Note(t=T + 90, name="last", data=1),
    ]  # fmt: skip
    back, _ = drawn(tmp_path, events)
    assert spans(back, "mark") == [("turn", 0, 20), ("now", 5, 5), ("other", 10, 90)]
    assert back.open == []
    assert of_category(back, "mark")[0]["args"] == {"mark": 0, "thread": 7}
    of_chrome = chrome.convert(tmp_path / "b.log", encode([*FACTS, *events]))
    found = [(e["name"], e["ts"] - T, e.get("dur", 0)) for e in of_chrome
             if e.get("cat") == "mark" or e["ph"] == "i"]  # fmt: skip
    assert sorted(found) == [("now", 5, 0), ("other", 10, 80), ("turn", 0, 20)]


@pytest.mark.parametrize(
    ("more", "expected"),
    [({}, {}), ({"p": 0.5}, {"p": 0.5}), ({"hex": "ff"}, {"hex": "ff"}),
     ({"p": 0.25, "hex": "c3"}, {"p": 0.25, "hex": "c3"})],
)  # fmt: skip
@pytest.mark.parametrize("step", [-1, 0])
def test_a_token_tells_what_the_log_has_of_it(
    tmp_path: Path, step: int, more: dict[str, Any], expected: dict[str, Any]
) -> None:
    back, _ = drawn(tmp_path, [*STEP, token(110, step, **more)])
    (of,) = of_category(back, "sampler")
    of_step = {"step": 0} if step == 0 else {}
    assert of["args"] == {"text": "x", "id": 1, "index": 0} | expected | of_step
    assert [o["args"] for o in of_category(back, "token")] == ([of["args"]] if step == 0 else [])


def test_values_are_counted_for_a_limited_number_of_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "VALUES", 2)
    line = next(of for of in EVERY_EVENT.read_text().splitlines() if "tensor_stats" in of)
    more = [json.dumps(json.loads(line) | {"name": name}) for name in ("a", "", "c", "a")]
    data = EVERY_EVENT.read_text().replace(line, "\n".join([line, *more]))
    back = Back(convert(tmp_path / "a.log", data.encode())[0])
    found = [name for name, *_ in back.counters if name.endswith(" max")]
    assert found == ["Qcur-0 max", "a max", "a max"]
    monkeypatch.setattr(stream, "VALUES", 3)
    back = Back(convert(tmp_path / "a.log", data.encode())[0])
    assert [name for name, *_ in back.counters if name.endswith(" max")] == [
        "Qcur-0 max", "a max", "node 3 max", "a max",
    ]  # fmt: skip


def test_splits_follow_each_other_and_say_what_they_end_with(tmp_path: Path) -> None:
    data = EVERY_EVENT.read_text()
    data = data.replace(
        '"splits":[{"start":0,"end":4,"backend":"CPU"}]',
        '"splits":[{"start":0,"end":3,"backend":"CPU"},{"start":3,"end":4,"backend":"GPU"}]',
    ).replace(
        '"split":[0],"dur":[29000],"asynchronous":[0]',
        '"split":[0,1],"gap":[5,10],"dur":[1000,200],"asynchronous":[0,1]',
    )
    back = Back(convert(tmp_path / "a.log", data.encode())[0])
    first = 81_005_050_050 + 5
    assert [(of["name"], of["ts"], of["dur"], of["args"]) for of in of_category(back, "split")] == [
        ("CPU", first, 1000, {"split": 0, "nodes": "0 to 2", "ends_with": "computation"}),
        ("submit to GPU", first + 1010, 200,
         {"split": 1, "nodes": "3 to 3", "ends_with": "submission"}),
    ]  # fmt: skip


def test_work_that_is_a_bound_is_marked_as_one() -> None:
    session = load_session(EVERY_EVENT)
    timeline = plan_timeline(session.graphs[0], session.plans[0])
    bound = np.array([False, True, False])
    marked = [span for span in layer_spans(timeline, Selection(), bound.tolist()) if span.op]
    assert [span.args.get("work") for span in marked] == [None, "at most", None]
    amounts = np.array([1, 2, 3])
    ops = s.Ops(t=T, compute=0, plan=0, thread=0, dur=[1, 2, 3], gap=None, wait=None, tail=0)

    def drawn_with(bound: np.ndarray) -> tuple[int, bytes]:
        """The bytes of the slices, and the words that they refer to."""
        packets, written = Packets(), list[bytes]()
        slices = KernelSlices(packets, lambda data: written.append(bytes(data)), Selection(), None)
        slices.add_ops(ops, timeline, 1, KernelWork(amounts, amounts, bound))
        slices.flush()
        return len(b"".join(written)), packets.take_interned()

    size, words = drawn_with(bound)
    size_of_none, words_of_none = drawn_with(np.array([False] * 3))
    assert size > size_of_none
    assert b"at most" in words
    assert b"at most" not in words_of_none
