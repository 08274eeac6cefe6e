"""Stops of a real model: where they are, what is in memory, and that they change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamacpp_instr
from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.graph import Listing
from llamacpp_instr.debugger.stop import Debugging, Go, Stop
from tests.conftest import Instr, read_events
from tests.kit.native_kit import open_llama

pytestmark = pytest.mark.native

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llama(demo_model: Path) -> Iterator[Any]:
    model = open_llama(demo_model, n_ctx=256, n_threads=1, logits_all=False)
    yield model
    model.close()


@pytest.fixture
def debugging(tmp_path: Path) -> Iterator[Debugging]:
    with llamacpp_instr.debug(tmp_path / "debug.log") as session:
        yield session


def decode(llama: Any, n: int = 3) -> str:
    llama.reset()
    answer = llama.create_completion(PROMPT, max_tokens=n, temperature=0)
    return str(answer["choices"][0]["text"])


def stops_at(place: str, llama: Any, debugging: Debugging, n: int = 3) -> Iterator[Stop]:
    debugging.add(place)
    return debugging.run(lambda: decode(llama, n))


def logits_of(llama: Any) -> bytes:
    """The logits of the prompt's last token, and of two more decodes."""
    llama.reset()
    llama._ctx.kv_cache_clear()
    found = b""
    for tokens in ([*llama.tokenize(PROMPT.encode())], [5], [9]):
        llama.eval(tokens)
        row = np.ctypeslib.as_array(llama._ctx.get_logits(), (llama.n_vocab(),))
        found += row.tobytes()
    return found


def test_each_step_stops_at_the_end_of_an_op_a_block_a_layer_or_a_decode(
    llama: Any, debugging: Debugging
) -> None:
    debugging.debugger.go = Go.OP
    ways = [Go.OP, Go.BLOCK, Go.LAYER, Go.LAYER, Go.DECODE, Go.DECODE, Go.ON]
    seen = []
    for stop, go in zip(debugging.run(lambda: decode(llama)), ways, strict=True):
        seen.append((stop.step, stop.node.name))
        stop.go = go
    assert seen == [
        (0, "embd"), (0, "norm-0"), (0, "attn_norm-0"), (0, "l_out-0"), (0, "l_out-1"),
        (0, "result_output"), (1, "result_output"),
    ]  # fmt: skip
    assert debugging.result == decode(llama)


def test_a_breakpoint_stops_after_its_op_in_every_step(llama: Any, debugging: Debugging) -> None:
    point = debugging.add("l_out-2")
    stops = [(s.step, s.n_tokens, s.node.name) for s in debugging.run(lambda: decode(llama))]
    assert stops == [(0, 5, "l_out-2"), (1, 1, "l_out-2"), (2, 1, "l_out-2")]
    assert point.hits == 3


def test_the_token_filter_is_the_position(llama: Any, debugging: Debugging) -> None:
    assert [stop.step for stop in stops_at("l_out-0 token=6", llama, debugging, n=4)] == [2]


def test_values_are_those_that_the_recorder_reads(llama: Any, tmp_path: Path) -> None:
    """`--stats` reads the same ops in C++."""
    with llamacpp_instr.record(tmp_path / "stats.log", stats="^(Qcur|l_out|ffn_swiglu)-"):
        decode(llama)
    recorded = [
        (event["name"], event["n"], event["min"], event["max"], event["mean"], event["std"])
        for event in read_events(tmp_path / "stats.log", "tensor_stats")
    ]
    read = []
    with llamacpp_instr.debug(tmp_path / "debug.log") as debugging:
        for pattern in ("Qcur-?", "l_out-?", "ffn_swiglu-?"):
            debugging.add(pattern)
        for stop in debugging.run(lambda: decode(llama)):
            x = stop.values().astype(np.float64)
            read.append((stop.node.name, x.size, x.min(), x.max(), x.mean(), x.std()))
    assert [row[:2] for row in read] == [row[:2] for row in recorded]
    # the log keeps nine digits
    figures = [row[2:] for row in read], [row[2:] for row in recorded]
    assert np.allclose(*figures, rtol=1e-8, atol=1e-10)
    assert len(read) > 30


def test_what_is_at_hand_still_has_the_value_it_was_given(llama: Any, debugging: Debugging) -> None:
    """Each op's result, copied when it was computed, equals what `values` gives later, unless an
    error says that it is gone."""
    first: dict[str, Any] = {}
    compared = gone = 0
    for stop in stops_at("* step=1", llama, debugging):
        first[stop.node.name] = stop.values()
        for name, before in first.items():
            now = None
            with suppress(UsageError):
                now = stop.values(name)
            if now is None:
                gone += 1
                continue
            if name in stop.graph.by_name and not name.startswith("cache_"):
                assert np.array_equal(now, before), (stop.node.name, name)
                compared += 1
    assert compared > 300
    assert gone > 300


def test_stops_that_change_nothing_change_nothing(llama: Any, tmp_path: Path) -> None:
    unwatched = logits_of(llama)
    with llamacpp_instr.debug(tmp_path / "debug.log") as debugging:
        debugging.add("block=feed-forward op=MUL_MAT")
        stops = 0
        for _ in debugging.run(lambda: logits_of(llama)):
            stops += 1
    assert stops == 3 * 4 * 3
    assert debugging.result == unwatched


def test_the_log_is_whole_and_says_that_it_is_perturbed(
    llama: Any, tmp_path: Path, instr: Instr
) -> None:
    with llamacpp_instr.debug(tmp_path / "debug.log") as debugging:
        assert len(list(stops_at("Vcur-1", llama, debugging))) == 3
    assert instr("check", tmp_path / "debug.log").returncode == 0
    [start] = read_events(tmp_path / "debug.log", "session_start")
    assert start["perturbed"] is True
    refused = instr("diff", tmp_path / "debug.log", tmp_path / "debug.log")
    assert refused.returncode == 2


def test_leaving_the_loop_lets_the_program_run_to_its_end(llama: Any, debugging: Debugging) -> None:
    for _ in stops_at("l_out-0", llama, debugging):
        break
    assert debugging.result == decode(llama)


def test_quitting_ends_the_compute(llama: Any, tmp_path: Path) -> None:
    with llamacpp_instr.debug(tmp_path / "debug.log") as debugging:
        debugging.add("l_out-0")
        debugging.on_stop = lambda _stop: Go.QUIT
        with pytest.raises(RuntimeError, match="llama_decode returned 2"):
            decode(llama)
    [end] = read_events(tmp_path / "debug.log", "step_end")
    assert end["status"] == 2


def test_an_error_of_the_program_reaches_the_caller(llama: Any, debugging: Debugging) -> None:
    def fails() -> None:
        decode(llama)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(debugging.run(fails))


def test_an_error_at_a_stop_ends_the_compute_and_is_raised(llama: Any, tmp_path: Path) -> None:
    def on_stop(_stop: Stop) -> Go:
        raise UsageError("nothing of the kind")

    def fails() -> None:
        with llamacpp_instr.debug(tmp_path / "debug.log") as debugging:
            debugging.on_stop = on_stop
            debugging.add("l_out-0")
            with pytest.raises(RuntimeError):
                decode(llama)

    with pytest.raises(UsageError, match="nothing of the kind"):
        fails()


def test_nothing_can_be_read_once_the_compute_has_gone_on(llama: Any, debugging: Debugging) -> None:
    [stop] = stops_at("l_out-0 step=0", llama, debugging)
    with pytest.raises(UsageError, match="the compute has gone on"):
        stop.values()


@pytest.mark.parametrize(
    ("place", "name", "message"),
    [
        ("l_out-1", "l_out-3", "has not been computed yet"),
        ("l_out-1", "attn_norm-0", "a later op uses its memory"),
        ("l_out-1", "l_uot-1", "no tensor 'l_uot-1'; the nearest are l_out-"),
        # the name means the later of two tensors; the first one has been computed here
        ("attn_norm-0", "norm-0", "norm-0 is gone: a later op uses its memory"),
    ],
)
def test_the_error_says_why_a_tensor_cannot_be_read(
    llama: Any, debugging: Debugging, place: str, name: str, message: str
) -> None:
    for stop in stops_at(f"{place} step=0", llama, debugging):
        with pytest.raises(UsageError) as refused:
            stop.values(name)
        assert message in str(refused.value)


def test_weights_and_caches_are_at_hand_as_the_file_has_them(
    llama: Any, debugging: Debugging, demo_model: Path
) -> None:
    from gguf import GGUFReader

    stored = {tensor.name: tensor for tensor in GGUFReader(demo_model).tensors}
    for stop in stops_at("op=SET_ROWS layer=0 cache_k* step=0", llama, debugging):
        norm = stop.values("blk.0.attn_norm.weight")
        assert np.array_equal(norm, stored["blk.0.attn_norm.weight"].data)
        cache = stop.values("cache_k_l0")
        assert cache.shape == (256, 128)
        written = stop.values("Kcur-0").reshape(5, 128)
        assert np.array_equal(cache[:5], written.astype(np.float16).astype(np.float32))


def test_a_breakpoint_that_matches_no_op_names_the_nearest(
    llama: Any, debugging: Debugging
) -> None:
    for _ in stops_at("l_out-0 step=0", llama, debugging):
        with pytest.raises(
            UsageError, match="no op of the graph matches; the nearest are ffn_out-"
        ):
            debugging.add("ffn_oot-*")


def test_the_listing_has_a_line_for_every_op_that_runs(llama: Any, debugging: Debugging) -> None:
    for stop in stops_at("l_out-0 step=0", llama, debugging):
        listing = Listing(stop.graph)
        running = [node.index for node in stop.graph.nodes if node.runs]
        assert sorted(node.index for node in listing.nodes.values()) == running
        for line, node in listing.nodes.items():
            assert f"{node.name}: " in listing.lines[line - 1]
        for i in range(running[-1]):
            assert listing.nodes[listing.line_of[i]].index >= i


def test_an_application_with_its_own_eval_callback_is_left_alone(
    demo_model: Path, tmp_path: Path
) -> None:
    import llama_cpp

    asked = []

    @llama_cpp.ggml_backend_sched_eval_callback
    def own(_tensor: Any, ask: bool, _data: Any) -> bool:
        asked.append(ask)
        return not ask

    model = open_llama(demo_model, n_ctx=64)
    model.context_params.cb_eval = own
    context = llama_cpp.llama_init_from_model(model._model.model, model.context_params)
    with llamacpp_instr.debug(tmp_path / "debug.log") as debugging:
        debugging.add("*")
        batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(5), 1)
        stops = list(debugging.run(lambda: llama_cpp.llama_decode(context, batch)))
    llama_cpp.llama_free(context)
    model.close()
    assert stops == []
    assert asked
    [message] = read_events(tmp_path / "debug.log", "message")
    assert "eval callback of its own" in message["text"]
