"""Calls that few programs make: what they do is in the log, or it is not a step."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

import llamacpp_instr
from llamacpp_instr.log.check import check_log
from llamacpp_instr.prediction.recorded import Shape, write_random_layers
from tests.conftest import read_events
from tests.kit.decoder import Decoder
from tests.kit.native_kit import DEMO

pytestmark = pytest.mark.native
api = pytest.importorskip("llama_cpp.llama_cpp")  # tests of other files need no `instr build`


def test_a_token_of_two_sequences_is_one_of_each_and_what_is_sampled_from_it_of_none(
    tmp_path: Path,
) -> None:
    decoder = Decoder(str(DEMO), n_seq_max=2)
    decoder.batch = api.llama_batch_init(8, 0, 2)
    log = tmp_path / "a.log"
    with llamacpp_instr.record(log):
        for i in range(3):
            decoder.batch.token[i], decoder.batch.pos[i] = 7 + i, i
            decoder.batch.n_seq_id[i] = 2
            decoder.batch.seq_id[i][0], decoder.batch.seq_id[i][1] = 0, 1
            decoder.batch.logits[i] = i == 2
        decoder.batch.n_tokens = 3
        assert api.llama_decode(decoder.ctx, decoder.batch) == 0
        decoder.sample()
        decoder.pos = [3, 3]
        decoder.decode({1: [5]})
        decoder.sample()
    assert list(check_log(log)) == []
    first, second = read_events(log, "step_begin")
    assert (sorted(first["seq"]), first["seq_tokens"]) == ([0, 1], [3, 3])
    assert first.get("seq_outputs", [1, 1]) == [1, 1]
    assert (first["n_tokens"], first["n_seqs"], second["seq"]) == (3, 2, [1])
    assert [token.get("seq", -1) for token in read_events(log, "token")] == [-1, 1]


def test_a_batch_that_llama_cpp_refuses_is_a_failed_step(tmp_path: Path) -> None:
    decoder = Decoder(str(DEMO))
    log = tmp_path / "a.log"
    with llamacpp_instr.record(log):
        decoder.decode({0: [7]})
        for wrong in ((1 << 20, 1), (7, 0)):  # an id outside the vocabulary; an empty batch
            token, n = (ctypes.c_int32 * 1)(wrong[0]), wrong[1]
            assert api.llama_decode(decoder.ctx, api.llama_batch_get_one(token, n)) == -1
        decoder.decode({0: [8]})
    assert list(check_log(log)) == []
    assert [step["status"] for step in read_events(log, "step_end")] == [0, -1, -1, 0]


def test_a_decode_from_a_callback_of_another_one_is_no_step(tmp_path: Path) -> None:
    outer, inner = Decoder(str(DEMO)), Decoder(str(DEMO))
    done: list[int] = []

    @api.ggml_abort_callback
    def decode(_data: object) -> bool:
        if not done:
            done.append(1)
            inner.decode({0: [9]})
        return False

    log = tmp_path / "a.log"
    with llamacpp_instr.record(log):
        inner.decode({0: [7]})
        api.llama_set_abort_callback(outer.ctx, decode, None)
        outer.decode({0: [7]})
        outer.decode({0: [8]})
        inner.decode({0: [8]})
    assert done
    assert list(check_log(log)) == []
    assert [step["ctx"] for step in read_events(log, "step_begin")] == [0, 1, 1, 0]
    assert {(of["ctx"], of.get("cache", 0)) for of in read_events(log, "kv")} == {(0, 0), (1, 0)}
    kernels = [len(of["dur"]) for of in read_events(log, "ops")]
    assert kernels[1] == kernels[2]


def test_a_token_of_a_model_without_a_vocabulary_has_no_text(tmp_path: Path) -> None:
    model = write_random_layers(tmp_path / "model.gguf", Shape(64, 64, 2, 2, 64), ["F32"])
    decoder = Decoder(str(model))
    log = tmp_path / "a.log"
    with llamacpp_instr.record(log):
        decoder.decode({0: [7]})
        sampled = decoder.sample()
    (token,) = read_events(log, "token")
    assert (token["id"], token["text"]) == (sampled, "")


def test_values_are_not_read_beside_the_eval_callback_of_the_application(tmp_path: Path) -> None:
    asked: list[bool] = []

    @api.ggml_backend_sched_eval_callback
    def look(_tensor: object, ask: bool, _data: object) -> bool:
        asked.append(ask)
        return False

    decoder = Decoder(str(DEMO), cb_eval=look)
    log = tmp_path / "a.log"
    with llamacpp_instr.record(log, stats="."):
        decoder.decode({0: [7]})
    assert asked
    assert read_events(log, "tensor_stats") == []
    (message,) = read_events(log, "message")
    assert message["level"] == "warn"
    assert "no tensor values are read" in message["text"]
