"""What a log says of steps, computes and caches is what the caller asked for and llama.cpp did."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamacpp_instr
from llamacpp_instr.llama import native
from llamacpp_instr.log.check import check_log
from tests.conftest import read_events
from tests.kit.decoder import Decoder
from tests.kit.native_kit import DEMO, random_model
from tests.kit.tiny_models import write_t5

pytestmark = pytest.mark.native
api = pytest.importorskip("llama_cpp.llama_cpp")  # tests of other files need no `instr build`

CELLS, UBATCH = 512, 32
CLOSE = 50_000
"""nanoseconds that the counter's time may differ from the clock's"""
KEYS = 4 * 2 * 128 * 2
"""bytes of a cell of the demo model: K and V of 4 layers, 2 heads of 64 values of 2 bytes"""


@dataclass
class Done:
    """What was asked of the context, in order: the batches, and the operations on the cache."""

    log: Path
    batches: list[dict[str, Any]] = field(default_factory=list)
    operations: list[dict[str, Any]] = field(default_factory=list)
    reused: int = 0
    threads: tuple[int, int] = (1, 2)

    def events(self, name: str) -> list[dict[str, Any]]:
        return read_events(self.log, name)


class Watched(Decoder):
    """A decoder that notes what it does."""

    def __init__(self, done: Done) -> None:
        super().__init__(str(DEMO), n_ubatch=UBATCH, n_seq_max=3)
        self.done = done
        self.memory = api.llama_get_memory(self.ctx)

    def decode(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, int]:
        asked = {
            "n_tokens": sum(map(len, tokens.values())),
            "most": max(map(len, tokens.values())),
            "seq_pos": [self.pos[seq] for seq in tokens],
            "seqs": list(tokens),
        }
        before = time.monotonic_ns()
        outputs = super().decode(tokens)
        self.done.batches.append({**asked, "before": before, "after": time.monotonic_ns()})
        return outputs

    def change(self, op: str, *arguments: int, used: int, **expected: int) -> None:
        getattr(api, f"llama_memory_{op}")(self.memory, *arguments)
        self.done.operations.append({"op": op, "used": used, **expected})


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    done = Done(tmp_path_factory.mktemp("batches") / "a.log")
    decoder = Watched(done)
    api.llama_set_n_threads(decoder.ctx, *done.threads)
    with llamacpp_instr.record(done.log, level="verbose"):
        decoder.decode({0: range(1, 71)})  # ubatches of 32, 32, 6
        for _ in range(3):
            decoder.decode({0: [decoder.sample()]})
        decoder.decode({1: [1, 2], 2: [3]})
        decoder.decode({1: [4], 2: [5]})
        decoder.change("seq_rm", 0, 60, 65, used=73 + 5 - 5, seq=0, p0=60, p1=65)
        decoder.change("seq_rm", 0, 60, 65, used=-1)  # nothing is there: no event
        decoder.change("seq_cp", 1, 2, 1, 9, used=73, seq=1, seq_dst=2, p0=1, p1=9)
        decoder.change("seq_add", 0, 65, -1, -5, used=73, seq=0, p0=65, p1=-1, arg=-5)
        decoder.pos[0] -= 5
        decoder.decode({0: [9]})  # after a shift of K
        decoder.change("seq_div", 1, 0, 3, 2, used=74, seq=1, p0=0, p1=3, arg=2)
        decoder.change("seq_keep", 0, used=69, seq=0)
        decoder.change("clear", 1, used=0)
        done.reused = api.llama_perf_context(decoder.ctx).n_reused
    assert list(check_log(done.log)) == []
    return done


def test_a_step_is_the_batch_that_was_given(done: Done) -> None:
    begins, ends = done.events("step_begin"), done.events("step_end")
    assert len(begins) == len(ends) == len(done.batches)
    for number, (begin, end, batch) in enumerate(zip(begins, ends, done.batches, strict=True)):
        assert begin["step"] == end["step"] == number
        assert (begin["ctx"], begin["kind"]) == (0, "decode")
        assert begin["phase"] == ("decode" if batch["most"] == 1 else "prefill")
        assert begin["n_tokens"] == batch["n_tokens"]
        assert begin["n_outputs"] == begin["n_seqs"] == len(batch["seqs"])
        assert begin["seq"] == batch["seqs"]
        assert begin["seq_pos"] == batch["seq_pos"]
        assert begin["pos"] == min(batch["seq_pos"])
        assert begin["thread"] == threading.get_native_id()
        assert batch["before"] - CLOSE <= begin["t"] <= end["t"] <= batch["after"] + CLOSE
        assert end["status"] == 0
        assert end["n_ubatch"] == -(-batch["n_tokens"] // UBATCH)
    assert sum(end["n_reused"] for end in ends) == done.reused > 0


def test_computes_are_the_ubatches(done: Done) -> None:
    computes = [c for c in done.events("compute") if c["source"] == "decode"]
    expected = [
        (step, min(UBATCH, batch["n_tokens"] - first))
        for step, batch in enumerate(done.batches)
        for first in range(0, batch["n_tokens"], UBATCH)
    ]
    assert [(c["step"], c["n_tokens"]) for c in computes] == expected
    assert {c["ctx"] for c in computes} == {0}
    assert sum(c["reused"] for c in computes) == done.reused
    one, several = done.threads
    for c in computes:
        assert c["n_threads"] == (one if c["n_tokens"] == 1 else several)
        assert ("build" in c) == ("alloc" in c) == (not c["reused"])
        assert "status" not in c
    every = done.events("compute")
    assert [c["compute"] for c in every] == list(range(len(every)))
    (update,) = [c for c in every if c["source"] == "memory_update"]
    assert not {"n_tokens", "apply", "build", "alloc", "inputs", "start"} & set(update)
    assert not update["reused"]
    threads = {c["compute"]: c["n_threads"] for c in every}
    for ops in done.events("ops"):
        assert ops.get("thread", 0) < threads[ops["compute"]]


def test_the_cache_is_what_was_put_into_it(done: Done) -> None:
    kv = done.events("kv")
    operations = [operation for operation in done.operations if operation["used"] >= 0]
    asked = [event for event in kv if event["op"] not in ("apply", "shift")]
    for event, operation in zip(asked, operations, strict=True):
        arguments = {key: event.get(key) for key in ("seq", "seq_dst", "p0", "p1", "arg")}
        assert (event["op"], event["used"]) == (operation["op"], operation["used"])
        assert {key: value for key, value in arguments.items() if value is not None} == {
            key: value for key, value in operation.items() if key not in ("op", "used")
        }
        assert not {"n_kv", "cells", "step"} & set(event)
    assert all(event["size"] == CELLS and event["ctx"] == 0 for event in kv)
    assert all(event["bytes"] == event["used"] * KEYS for event in kv)
    assert not any({"cache", "kind"} & set(event) for event in kv)


def test_a_ubatch_takes_the_cells_that_are_free(done: Done) -> None:
    applied = [event for event in done.events("kv") if event["op"] == "apply"]
    computes = [c for c in done.events("compute") if c["source"] == "decode"]
    masks = {graph["graph"]: mask_of(graph) for graph in done.events("graph")}
    held = 0
    for event, compute in zip(applied, computes, strict=True):
        n = compute["n_tokens"]
        if compute["step"] == len(done.batches) - 1:
            held -= 5  # were removed
            assert event["cells"][0] in {*range(60, 65), *range(78, CELLS)}, "free"
        else:
            assert event["cells"] == list(range(held, held + n))
        held += n
        assert event["used"] == held
        assert event["step"] == compute["step"]
        assert compute["t"] - CLOSE <= event["t"] <= compute["t"] + compute["start"] + CLOSE
        assert event["n_kv"] == masks[compute["graph"]]
    (shift,) = [event for event in done.events("kv") if event["op"] == "shift"]
    assert (shift["used"], shift["step"]) == (73, len(done.batches) - 1)
    assert not {"n_kv", "cells"} & set(shift)


def mask_of(graph: dict[str, Any]) -> int:
    """Cells that attention reads, by ggml's own graph."""
    leafs = [leaf for leaf in graph["leafs"] if "kq_mask" in leaf["name"]]
    return int(leafs[0]["ne"][0]) if leafs else -1


def test_the_caches_of_a_context_are_told_apart(tmp_path: Path) -> None:
    """Sliding windows have a cache of their own, recurrent layers a state for each sequence."""
    for name in ("gemma3-dense", "mamba-dense", "jamba-dense"):
        decoder = Decoder(str(random_model(name)), n_seq_max=2, swa_full=False)
        with llamacpp_instr.record(tmp_path / f"{name}.log", level="minimal"):
            decoder.decode({0: [1, 2, 3], 1: [4]})
            decoder.decode({0: [5]})
            decoder.forget()
        memory = read_events(tmp_path / f"{name}.log", "memory")[0]
        held = sum(use.get("context", 0) for use in memory["buffers"])
        kv = read_events(tmp_path / f"{name}.log", "kv")
        last = {event.get("cache", 0): event for event in kv if event["op"] == "apply"}
        kinds = [last[cache].get("kind", "kv") for cache in sorted(last)]
        assert (
            kinds
            == {
                "gemma3-dense": ["kv", "kv"],
                "mamba-dense": ["recurrent"],
                "jamba-dense": ["kv", "recurrent"],
            }[name]
        )
        for event in last.values():
            recurrent = event.get("kind") == "recurrent"
            assert event["used"] == (2 if recurrent else 5)
            assert event["n_kv"] == 1 if recurrent else event["n_kv"] >= event["used"]
        # the bytes of all cells together are those of the buffers, but for what a cell rounds
        whole = sum(event["bytes"] / event["used"] * event["size"] for event in last.values())
        assert whole == pytest.approx(held, rel=0.02), name
        cleared = [event for event in kv if event["op"] == "clear"]
        assert [(event.get("cache", 0), event["used"]) for event in cleared] == [
            (cache, 0) for cache in sorted(last)
        ]


@pytest.mark.parametrize("name", ["llama-dense", "mamba-dense"])
def test_a_session_may_begin_inside_of_a_step(name: str, tmp_path: Path) -> None:
    """The rest of that step belongs to no step."""
    library, log = native.load(), tmp_path / "a.log"

    def begin(_tensor: int, _ask: bool, _data: int) -> bool:
        if not library.status() & native.ACTIVE:
            assert library.begin(bytes(log), "detailed", "", None, 0) == 0
        return False

    callback = api.ggml_backend_sched_eval_callback(begin)
    model = str(random_model(name))
    decoder = Decoder(model, n_ubatch=2, cb_eval=callback)
    decoder.decode({0: [1, 2, 3, 4]})
    decoder.decode({0: [5]})
    assert library.end() == 0
    assert list(check_log(log)) == []
    assert [step["n_tokens"] for step in read_events(log, "step_begin")] == [1]
    assert {event["step"] for event in read_events(log, "kv")} == {0}


def test_an_encoder_gives_all_its_outputs(tmp_path: Path) -> None:
    write_t5(tmp_path / "t5.gguf")
    decoder = Decoder(str(tmp_path / "t5.gguf"))
    with llamacpp_instr.record(tmp_path / "a.log", level="minimal"):
        tokens = (ctypes.c_int32 * 3)(1, 2, 3)
        assert api.llama_encode(decoder.ctx, api.llama_batch_get_one(tokens, 3)) == 0
    (begin,), (compute,) = (
        read_events(tmp_path / "a.log", name) for name in ("step_begin", "compute")
    )
    assert (begin["kind"], begin["n_tokens"], begin["n_outputs"]) == ("encode", 3, 3)
    assert compute["source"] == "encode"
    (graph,) = read_events(tmp_path / "a.log", "graph")
    assert graph["source"] == "encode"


def test_a_step_that_fails_has_its_status(tmp_path: Path) -> None:
    decoder = Decoder(str(DEMO), n_ctx=256)
    abort = api.ggml_abort_callback(lambda _: True)
    with llamacpp_instr.record(tmp_path / "a.log", level="detailed"):
        decoder.decode({0: [1] * 250})
        token = (ctypes.c_int32 * 10)(*[7] * 10)
        statuses = [api.llama_decode(decoder.ctx, api.llama_batch_get_one(token, 10))]
        decoder.forget()
        api.llama_set_abort_callback(decoder.ctx, abort, None)
        statuses.append(api.llama_decode(decoder.ctx, api.llama_batch_get_one(token, 1)))
        api.llama_set_abort_callback(decoder.ctx, api.ggml_abort_callback(), None)
    ends = read_events(tmp_path / "a.log", "step_end")
    assert [end["status"] for end in ends] == [0, *statuses]
    assert statuses == [1, 2]
    computes = read_events(tmp_path / "a.log", "compute")
    assert [c.get("status", 0) for c in computes] == [0, 1]  # GGML_STATUS_ABORTED
    assert [end["n_ubatch"] for end in ends] == [1, 0, 1]


def forced(decoder: Decoder, token: int) -> Any:
    """A sampler that can only give this token, after the probabilities were computed."""
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    bias = (api.llama_logit_bias * 1)(api.llama_logit_bias(token, 1e9))
    vocabulary = api.llama_model_get_vocab(decoder.model)
    n = api.llama_vocab_n_tokens(vocabulary)
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_logit_bias(n, 1, bias))
    api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
    return chain


def test_a_token_is_what_the_sampler_gave(tmp_path: Path) -> None:
    decoder = Decoder(str(DEMO), n_seq_max=2)
    vocabulary = api.llama_model_get_vocab(decoder.model)
    n_vocab = api.llama_vocab_n_tokens(vocabulary)
    dist = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    api.llama_sampler_chain_add(dist, api.llama_sampler_init_dist(1))
    expected = []
    byte_e2 = 3 + 0xE2  # after <unk>, <s>, </s>
    with llamacpp_instr.record(tmp_path / "a.log", level="minimal"):
        for step, (seq, sampler) in enumerate(
            [(0, dist), (1, decoder.sampler), (1, forced(decoder, byte_e2)), (0, dist)]
        ):
            decoder.decode({seq: [5 + step]})
            logits = np.ctypeslib.as_array(api.llama_get_logits_ith(decoder.ctx, -1), (n_vocab,))
            shares = np.exp(logits.astype(np.float64) - logits.max())
            before = time.monotonic_ns()
            token = api.llama_sampler_sample(sampler, decoder.ctx, -1)
            after = time.monotonic_ns()
            text = ctypes.create_string_buffer(64)
            size = api.llama_token_to_piece(vocabulary, token, text, 64, 0, True)
            p = shares[token] / shares.sum() if sampler is dist else None
            expected.append((step, seq, token, text.raw[:size], p, before, after))
    tokens = read_events(tmp_path / "a.log", "token")
    for index, (event, truth) in enumerate(zip(tokens, expected, strict=True)):
        step, seq, token, text, p, before, after = truth
        assert (event["ctx"], event["index"]) == (0, index)
        assert (event["step"], event["seq"], event["id"]) == (step, seq, token)
        assert event["text"] == text.decode(errors="replace")
        assert event.get("hex") == (text.hex() if text == b"\xe2" else None)
        assert event.get("p") == (pytest.approx(p, rel=1e-4) if p else None)
        assert before - CLOSE <= event["t"] <= event["t"] + event["dur"] <= after + CLOSE
    assert tokens[2]["hex"] == "e2"
