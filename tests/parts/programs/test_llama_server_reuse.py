"""Why a recorded llama-server computed a prompt: each reason, provoked; and drafted tokens."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.analyses.serving import (
    CHANGED,
    CHECKPOINT,
    ELSEWHERE,
    EVICTED,
    OFF,
    SHIFTED,
    SHORT,
    compute_speculation,
    missed_prompts,
)
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.requests import find_requests, left_requests, prompt_copies
from llamacpp_instr.log.session import load_session
from llamacpp_instr.log.steps import counted_steps
from llamacpp_instr.prediction.probe.file import read_probe
from llamacpp_instr.prediction.steps import predict_tokens
from tests.conftest import read_events
from tests.kit.llama_programs import Server, llama_server, programs
from tests.kit.rpc_kit import until

pytestmark = pytest.mark.native

STORY = "Once upon a time there was a little fox who lived in a forest near the hill. " * 4
OTHER = "The baker of the town had a blue hat, and he sold bread to the children every day. " * 4
BATCH = ("-c", "1024", "-np", "2", "--cache-ram", "0")
PROBE = "tests/fixtures/machine.json"
DRAFT = ("--spec-type", "draft-simple", "--spec-draft-n-max", "4")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def sliding(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's weights in an architecture whose layers see the last 32 tokens."""
    path = tmp_path_factory.mktemp("models") / "sliding.gguf"
    reader, writer = gguf.GGUFReader(demo_model), gguf.GGUFWriter(path, "cohere2")
    for name, of in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            item = of.types[-1] if of.types[0] == gguf.GGUFValueType.ARRAY else None
            key = name.replace("llama.", "cohere2.")
            writer.add_key_value(key, of.contents(), of.types[0], item)
    writer.add_layer_norm_eps(1e-5)
    writer.add_sliding_window(32)
    writer.add_logit_scale(1.0)
    for tensor in reader.tensors:
        if "ffn_norm" not in tensor.name and tensor.name != "output.weight":
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reasons(model: Path, log: Path, requests: list[dict[str, Any]], *options: str) -> list[Any]:
    """Why each of these requests, one after the other, computed its prompt; with the tokens."""
    with llama_server(model, log, *options) as server:
        for request in requests:
            server.complete(**request)
    assert list(check_log(log)) == []
    _, found = find_requests(load_session(log))
    assert len(found) == len(requests)
    return [of and (of.reason, of.tokens) for of in missed_prompts(found)]


def ask(prompt: str, slot: int = 0, n: int = 4, **options: Any) -> dict[str, Any]:
    return {"prompt": prompt, "n": n, "id_slot": slot, **options}


def test_the_same_prompt_has_nothing_to_miss(demo_model: Path, tmp_path: Path) -> None:
    found = reasons(demo_model, tmp_path / "a.log", [ask(STORY), ask(STORY)], *BATCH)
    assert found == [(SHORT, 0), None]


def test_another_slot_has_the_prompt(demo_model: Path, tmp_path: Path) -> None:
    asked = [ask(STORY), ask(STORY, slot=1)]
    _, (reason, tokens) = reasons(demo_model, tmp_path / "a.log", asked, *BATCH)
    assert reason == ELSEWHERE
    _, requests = find_requests(load_session(tmp_path / "a.log"))
    assert tokens == requests[0].prompt


def test_another_prompt_took_its_place(demo_model: Path, tmp_path: Path) -> None:
    asked = [ask(STORY), ask(OTHER), ask(STORY)]
    found = reasons(demo_model, tmp_path / "a.log", asked, *BATCH)
    assert [of[0] for of in found] == [SHORT, SHORT, EVICTED]
    _, requests = find_requests(load_session(tmp_path / "a.log"))
    assert requests[0].prompt - 16 < found[2][1] <= requests[0].prompt


def test_the_context_was_shifted(demo_model: Path, tmp_path: Path) -> None:
    asked = [ask(STORY, n=400), ask(STORY)]
    options = ("-c", "256", "-np", "1", "--cache-ram", "0", "--context-shift")
    found = reasons(demo_model, tmp_path / "a.log", asked, *options)
    assert found[1][0] == SHIFTED


def test_a_sliding_window_needs_a_checkpoint(sliding: Path, tmp_path: Path) -> None:
    """The window has moved on, and the server keeps no checkpoint."""
    asked = [ask(STORY, n=400), ask(STORY)]
    options = ("-c", "1024", "-np", "1", "-ub", "32", "--cache-ram", "0", "--ctx-checkpoints", "0")
    found = reasons(sliding, tmp_path / "a.log", asked, *options)
    assert found[1][0] == CHECKPOINT


def test_a_prompt_begins_differently(demo_model: Path, tmp_path: Path) -> None:
    text = STORY + OTHER
    asked = [ask(f"Monday. {text}"), ask(f"It is now Tuesday. {text}")]
    _, (reason, tokens) = reasons(demo_model, tmp_path / "a.log", asked, *BATCH)
    assert reason == CHANGED
    _, requests = find_requests(load_session(tmp_path / "a.log"))
    assert 0.6 * requests[1].prompt < tokens < requests[1].prompt


def test_a_request_may_forbid_reuse(demo_model: Path, tmp_path: Path) -> None:
    asked = [ask(STORY), ask(STORY, cache_prompt=False)]
    found = reasons(demo_model, tmp_path / "a.log", asked, *BATCH)
    assert found[1][0] == OFF


# --- who a request is ---


def test_a_request_names_the_clients_trace(demo_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with llama_server(demo_model, log, *BATCH) as server:
        server.complete("Once", 2, trace=TRACE)
        server.complete("Once", 2)
    _, (first, second) = find_requests(load_session(log))
    assert first.served is not None
    assert first.served.traceparent == TRACE
    assert second.served is not None
    assert second.served.traceparent == ""
    assert second.served.path == "/completion"
    assert second.served.operation == "text_completion"


def test_a_client_may_leave_the_queue(demo_model: Path, tmp_path: Path) -> None:
    """The only slot works meanwhile for one that streams nothing: while tokens are streamed, the
    server does not look whether another client has left."""
    log = tmp_path / "a.log"
    long = ("-c", "32768", "-np", "1", "--override-kv", "llama.context_length=int:32768")
    with llama_server(demo_model, log, *long) as server, ThreadPoolExecutor(1) as pool:
        busy = pool.submit(leave, server, 3, STORY, 30_000)
        while "llamacpp:requests_processing 1" not in server.get("/metrics"):
            time.sleep(0.05)
        with asked(server, OTHER, 4):
            until(lambda: "llamacpp:requests_deferred 1" in server.get("/metrics"))
        busy.result()
        server.complete("Once", 2)
    session = load_session(log)
    ends = [of.served and of.served.end for of in find_requests(session)[1]]
    assert ends == ["cancelled", "limit"]
    (left,) = left_requests(session)
    assert left.served is not None
    assert (left.served.path, left.served.operation) == ("/completion", "text_completion")


def leave(server: Server, after: float, prompt: str, n: int) -> None:
    """Sends a request and closes the connection after this many seconds."""
    with asked(server, prompt, n):
        time.sleep(after)


def asked(server: Server, prompt: str, n: int) -> socket.socket:
    """The connection of a request that was sent."""
    body = json.dumps({"prompt": prompt, "n_predict": n, "ignore_eos": True}).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(head.encode() + body)
    return connection


def test_prompts_move_to_ram_and_back(demo_model: Path, tmp_path: Path) -> None:
    """The only slot takes another prompt, and then the first one again, which the server kept."""
    log, size = tmp_path / "a.log", {"first": 0, "other": 0}
    with llama_server(demo_model, log, "-c", "1024", "-np", "1", "--cache-ram", "64") as server:
        for name, prompt in (("first", STORY), ("other", OTHER)):
            timings = server.complete(prompt, 4).timings
            size[name] = sum(timings[of] for of in ("cache_n", "prompt_n", "predicted_n")) - 1
        again = server.complete(STORY, 4).timings
    assert again["prompt_n"] == 1
    moves = prompt_copies(load_session(log))
    assert [(of.op, of.slot, of.tokens, of.copies) for of in moves] == [
        ("save", 0, size["first"], 1), ("save", 0, size["other"], 2), ("load", 0, size["first"], 1),
    ]  # fmt: skip
    first, other, back = moves
    assert back.bytes == first.bytes == first.held > size["first"] * 64
    assert (other.held, back.held) == (first.bytes + other.bytes, other.bytes)
    assert {of.limit for of in moves} == {64 << 20}
    assert all(of.dur > 0 for of in moves)


def test_answers_to_one_prompt_are_requests_of_their_own(demo_model: Path, tmp_path: Path) -> None:
    """With `n` the first token of each comes from the logits of one of them."""
    log = tmp_path / "a.log"
    with llama_server(demo_model, log, "-c", "1024", "-np", "4") as server:
        server.complete(STORY, 8, n_cmpl=3)
    _, requests = find_requests(load_session(log))
    assert [len(request.token_times) for request in requests] == [8, 8, 8]
    assert sorted(request.prompt > 0 for request in requests) == [False, False, True]


# --- speculative decoding ---


def test_drafts_belong_to_requests_and_are_those_of_the_server(
    demo_model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "a.log"
    options = ("-c", "1024", "-np", "2", "-md", str(demo_model), *DRAFT)
    with llama_server(demo_model, log, *options) as server:
        answers = server.complete_all([[STORY, "Once"], [OTHER]], [[24, 17], [31]])
    assert list(check_log(log)) == []
    session = load_session(log)
    assert [context["target"] for context in read_events(log, "context") if "target" in context]
    _, requests = find_requests(session)
    by_tokens = {len(request.token_times): request for request in requests}
    assert sorted(by_tokens) == [17, 24, 31]
    timings = {answer.timings["predicted_n"]: answer.timings for answer in answers}
    for n, request in by_tokens.items():
        assert request.served is not None
        assert request.served.drafted == timings[n]["draft_n"]
        assert request.served.accepted == timings[n]["draft_n_accepted"]
        assert request.prompt == timings[n]["prompt_n"]
    found = compute_speculation(session, counted_steps(session)[0])
    assert found is not None
    assert found.drafted.sum() == sum(of["draft_n"] for of in timings.values())
    assert found.accepted.sum() == sum(of["draft_n_accepted"] for of in timings.values())
    assert found.draft_ns > 0


def test_the_speed_without_drafts_is_predicted_if_all_decodes_have_some(
    demo_model: Path, tmp_path: Path
) -> None:
    """A draft model that is the model itself: all steps that follow the prompt verify drafts. A
    decode of one token takes less than one of several, but no less in proportion."""
    log = tmp_path / "a.log"
    options = ("-c", "1024", "-np", "1", "-md", str(demo_model), *DRAFT)
    with llama_server(demo_model, log, *options) as server:
        server.complete(STORY, 31)
    session = load_session(log)
    steps, _ = counted_steps(session)
    predict = partial(predict_tokens, probe=read_probe(PROBE))
    without = compute_speculation(session, steps)
    assert without is not None
    assert "predict" not in without.plain_by
    found = compute_speculation(session, steps, predict)
    assert found is not None
    assert found.plain_by.startswith("based on `instr predict`")
    verify = median(
        end - begin
        for begin, end, phase, n in steps.tuples("begin", "end", "phase", "n_tokens")
        if phase == "decode" and n > 1
    )
    assert verify / 5 < (found.plain_ns or 0) < verify
    other = copy(session)
    other.models = {
        key: replace(model, path=str(tmp_path / "gone.gguf"))
        for key, model in session.models.items()
    }
    alone = compute_speculation(other, steps, predict)
    assert alone is not None
    assert "predict" not in alone.plain_by


def test_drafts_are_those_of_llama_speculative_simple(demo_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    command = [programs() / "llama-speculative-simple", "-m", demo_model, "-md", demo_model, "-p",
               STORY, "-n", "32", "-c", "512", "--temp", "0", *DRAFT, "-t",
               "1"]  # fmt: skip
    ran = subprocess.run(
        command, env={"LLAMA_INSTR_LOG": str(log)}, capture_output=True, text=True, check=True
    )
    stated = dict(re.findall(r"(n_drafted|n_accept) += (\d+)", ran.stdout + ran.stderr))
    session = load_session(log)
    found = compute_speculation(session, counted_steps(session)[0])
    assert found is not None
    assert found.drafted.sum() == int(stated["n_drafted"])
    assert found.accepted.sum() == int(stated["n_accept"])
