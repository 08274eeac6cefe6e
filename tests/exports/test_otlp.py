"""`instr to-otlp`: the spans that a collector gets, against what `instr requests` prints."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from msgspec.structs import replace

from llamacpp_instr.converters.exports.names import host_of
from llamacpp_instr.log import schema as s
from tests.kit.batched_log import Batch, batched_log
from tests.kit.commands_kit import one_line
from tests.kit.in_process import instr_here, json_reports, printed, refusal
from tests.kit.made_log import encode, make_log
from tests.kit.noted_log import PARENT, TRACE, closed, note, noted
from tests.kit.otlp_receiver import Receiver, attributes_of, receiver, value_of
from tests.kit.split_log import split_log

SEND = one_line("docs/reference/commands.md", "instr to-otlp server.log --endpoint")
OWN = "llamacpp_instr."


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from the environment, and a short timeout."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


def sent(*words: object) -> Receiver:
    """What a collector gets from a command that must succeed."""
    with receiver() as received:
        done = instr_here("to-otlp", *words, "--endpoint", received.url)
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr.startswith(f"{received.url}/v1/traces: ")
    return received


def logged(path: Path, *events: s.Event) -> Path:
    """A log of these events that has an end."""
    has_end = isinstance(events[-1], s.SessionEnd)
    path.write_bytes(encode([*events] if has_end else closed([*events])))
    return path


def one_request(*batches: Batch, wait: int = 300, **of: Any) -> list[s.Event]:
    """A log of a request of llama-server, with what it notes. It arrives `wait` ns before its first
    step."""
    *facts, graph = batched_log([])
    served = batched_log(batches or [one(0, 5), one(5, 1)])[len(facts) + 1 :]
    begin, end = served[0].t - wait, served[-1].t + 1000
    mark = s.Mark(t=begin, mark=3, name="request", phase="begin")
    over = replace(mark, t=end, phase="end", seq=0)
    return [*facts, graph, mark, *served, note(3, end, **of), over]


def one(pos: int, tokens: int) -> Batch:
    return Batch([(0, pos, tokens)], sampled=[(0, 1, "secret")])


def roots_of(received: Receiver) -> list[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Each span of a request, its attributes, and its children by name."""
    children: defaultdict[tuple[bytes, bytes], dict[str, Any]] = defaultdict(dict)
    for span in received.spans:
        children[span.trace_id, span.parent_span_id][span.name] = span
    roots = [span for span in received.spans if OWN + "sequence" in attributes_of(span)]
    return [(of, attributes_of(of), children[of.trace_id, of.span_id]) for of in roots]


def dur(span: Any) -> int:
    ns: int = span.end_time_unix_nano - span.start_time_unix_nano
    return ns


@pytest.mark.parametrize("seed", range(2))
def test_every_request_is_a_span_with_the_figures_of_instr_requests(
    seed: int, tmp_path: Path
) -> None:
    log = logged(tmp_path / "server.log", *noted(Random(seed)))
    *_, table = json_reports("requests", log, "--top", 10_000)
    found = roots_of(sent(log))
    began = min(root.start_time_unix_nano for root, *_ in found)
    rows = []
    for root, of, parts in found:
        queue, prefill, decode = map(parts.get, ("queue", "prefill", "decode"))
        first = sum(dur(span) for span in (queue, prefill) if span) if decode else None
        rows.append({
            "name": of.get(OWN + "mark", ""), "context": of[OWN + "context"],
            "sequence": of[OWN + "sequence"], "from": root.start_time_unix_nano - began,
            "queued": dur(queue) if queue else None,
            "prompt": of["gen_ai.usage.input_tokens"] - of["gen_ai.usage.cache_read.input_tokens"],
            "reused": of["gen_ai.usage.cache_read.input_tokens"],
            "output": of["gen_ai.usage.output_tokens"], "task": of.get(OWN + "task"),
            "first token": first, "total": dur(root), "queue": of[OWN + "wait.queue_ns"],
            "its prompt": of[OWN + "wait.prompt_ns"], "its tokens": of[OWN + "wait.tokens_ns"],
            "other requests": of[OWN + "wait.others_ns"], "the rest": of[OWN + "wait.rest_ns"],
        })  # fmt: skip
        assert of.get(OWN + "time_to_first_token_ns") == first
    shown = [{name: row[name] for name in rows[0]} for row in table["rows"]]
    assert len(shown) > 100
    assert sorted(rows, key=str) == sorted(shown, key=str)


@pytest.mark.parametrize("seed", range(2))
def test_children_share_the_time_of_their_request(seed: int, tmp_path: Path) -> None:
    received = sent(logged(tmp_path / "server.log", *noted(Random(seed))))
    roots = roots_of(received)
    assert len({span.span_id for span in received.spans}) == len(received.spans)
    assert len(received.spans) == len(roots) + sum(len(parts) for *_, parts in roots)
    for root, of, parts in roots:
        spans = [span for name in ("queue", "prefill", "decode") if (span := parts.get(name))]
        ends = [root.start_time_unix_nano, *(span.end_time_unix_nano for span in spans)]
        assert [span.start_time_unix_nano for span in spans] == ends[:-1]
        assert ends[-1] == root.end_time_unix_nano
        assert {span.trace_id for span in spans} == {root.trace_id}
        own = 0
        for span in spans:
            for event in span.events:
                assert event.name == "step"
                assert span.start_time_unix_nano <= event.time_unix_nano < span.end_time_unix_nano
                own += attributes_of(event)[OWN + "step.duration_ns"]
        if not any(span.dropped_events_count for span in spans):
            assert own == of[OWN + "wait.prompt_ns"] + of[OWN + "wait.tokens_ns"]


def test_a_file_has_what_a_collector_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In OTLP's JSON, whose ids are hexadecimal; by default beside the log."""
    monkeypatch.chdir(tmp_path)
    log = logged(tmp_path / "server.log", *noted(Random(3)))
    done = instr_here("to-otlp", "server.log")
    assert done.returncode == 0
    assert done.stderr.startswith("server.otlp.jsonl: ")
    received = sent(log)
    lines = (tmp_path / "server.otlp.jsonl").read_bytes().splitlines()
    assert len(lines) == len(received.taken) > 1
    for line, wanted in zip(map(json.loads, lines), received.taken, strict=True):
        ids = []
        for of in line["resourceSpans"]:
            for span in (span for scope in of["scopeSpans"] for span in scope["spans"]):
                ids.append([span.pop(k, "") for k in ("traceId", "spanId", "parentSpanId")])
                assert type(span["kind"]) is int
        spans = [x for of in wanted.resource_spans for y in of.scope_spans for x in y.spans]
        assert ids == [[x.trace_id.hex(), x.span_id.hex(), x.parent_span_id.hex()] for x in spans]
        for x in spans:
            for name in ("trace_id", "span_id", "parent_span_id"):
                x.ClearField(name)
        assert line == MessageToDict(wanted, use_integers_for_enums=True)
    assert printed("to-otlp", log, "-o", "-").encode().splitlines() == lines
    assert "exists" in refusal("to-otlp", "server.log")
    assert instr_here("to-otlp", "server.log", "--force").returncode == 0


def test_a_request_of_a_server_in_words_of_the_conventions(tmp_path: Path) -> None:
    log = logged(tmp_path / "a.log", *one_request(drafted=8, accepted=5))
    ((root, of, parts),) = roots_of(sent(log))
    model = of.pop("gen_ai.request.model")
    assert root.name == f"text_completion {model}"
    assert root.kind == root.SPAN_KIND_SERVER
    assert {part.kind for part in parts.values()} == {root.SPAN_KIND_INTERNAL}
    (table,) = [t for t in json_reports("requests", log) if t["id"] == "requests"]
    (row,) = table["rows"]
    assert of.pop("gen_ai.response.time_to_first_chunk") * 1e9 == pytest.approx(row["first token"])
    assert {k: v for k, v in of.items() if not k.startswith(OWN + "wait")} == {
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "llama.cpp",
        "gen_ai.usage.input_tokens": 6 - 1, "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 2, "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.request.stream": True, OWN + "context": 0, OWN + "sequence": 0,
        OWN + "mark": "request", OWN + "time_to_first_token_ns": row["first token"],
        OWN + "task": 3, OWN + "drafted_tokens": 8, OWN + "accepted_tokens": 5,
    }  # fmt: skip
    assert dur(parts["queue"]) == 300
    assert [len(parts[name].events) for name in ("queue", "prefill", "decode")] == [0, 1, 1]


@pytest.mark.parametrize(
    ("stop", "reasons", "operation", "error"),
    [
        ("eos", ["stop"], "text_completion", None),
        ("word", ["stop"], "text_completion", None),
        ("limit", ["length"], "text_completion", None),
        ("none", ["error"], "text_completion", "cancelled"),
        ("done", None, "embeddings", None),
    ],
)
def test_how_it_ended(
    stop: str, reasons: Any, operation: str, error: str | None, tmp_path: Path
) -> None:
    log = logged(tmp_path / "a.log", *one_request(stop=stop, stream=False))
    ((root, of, _),) = roots_of(sent(log))
    assert of.get("gen_ai.response.finish_reasons") == reasons
    assert of["gen_ai.operation.name"] == operation
    assert of.get("error.type") == error
    assert (root.status.code, root.status.message) == ((2, error) if error else (0, ""))
    assert not {"gen_ai.request.stream", "gen_ai.response.time_to_first_chunk"} & of.keys()


def test_times_are_those_of_the_day(tmp_path: Path) -> None:
    events = one_request()
    start = events[0]
    assert isinstance(start, s.SessionStart)
    ((root, *_),) = roots_of(sent(logged(tmp_path / "a.log", *events)))
    arrival = next(e.t for e in events if isinstance(e, s.Mark))
    assert root.start_time_unix_nano == start.wall + arrival - start.t


def test_a_span_has_no_text(tmp_path: Path) -> None:
    """Neither tokens, nor the command line, in which a prompt may be."""
    events = one_request()
    assert isinstance(events[0], s.SessionStart)
    events[0].process.argv = ["/home/someone/bin/llama-server", "-p", "secret"]
    received = sent(logged(tmp_path / "a.log", *events))
    (request,) = received.taken
    for word in (b"secret", b"someone"):
        assert word in encode(events)
        assert word not in request.SerializeToString()


def test_resources_are_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = one_request()
    start = events[0]
    assert isinstance(start, s.SessionStart)
    log = logged(tmp_path / "a.log", *events)
    (of,) = sent(log).resources
    wanted = {
        "service.name": "python", "service.version": "0.3.36+instr.1",
        "service.instance.id": start.id, "host.name": host_of(start),
        "host.cpu.model.name": "A CPU", "os.description": "Linux", "process.pid": 42,
        "process.executable.name": "python", OWN + "level": start.level,
    }  # fmt: skip
    assert {k: v for k, v in of.items() if not k.startswith("telemetry.sdk.")} == wanted
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=here,team=a")
    (of,) = sent(log).resources
    assert (of["service.name"], of["host.name"], of["team"]) == ("chat", "here", "a")


def test_variables_of_the_environment_set_headers_and_compression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=k%201,other=x")
    (headers,) = sent(logged(tmp_path / "a.log", *one_request())).headers
    named = {name.lower(): value for name, value in headers.items()}
    assert (named["api-key"], named["other"]) == ("k 1", "x")


# --- the trace that a request belongs to ---


def test_the_span_of_a_client_is_its_parent(tmp_path: Path) -> None:
    log = logged(tmp_path / "a.log", *one_request(traceparent=f"00-{TRACE}-{PARENT}-01"))
    ((root, _, parts),) = roots_of(sent(log))
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert {part.trace_id.hex() for part in parts.values()} == {TRACE}
    assert {part.parent_span_id for part in parts.values()} == {root.span_id}


@pytest.mark.parametrize(
    "wrong", ["", "x", f"00-{TRACE}", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"]
)
def test_what_is_no_traceparent_is_no_parent(wrong: str, tmp_path: Path) -> None:
    log = logged(tmp_path / "a.log", *one_request(traceparent=wrong))
    ((root, *_),) = roots_of(sent(log))
    assert root.parent_span_id == b""
    assert root.trace_id.hex() != TRACE


def test_what_a_client_does_not_sample_is_not_sent(tmp_path: Path) -> None:
    log = logged(tmp_path / "a.log", *one_request(traceparent=f"00-{TRACE}-{PARENT}-00"))
    with receiver() as received:
        done = instr_here("to-otlp", log, "--endpoint", received.url)
    assert done.stderr == f"{received.url}/v1/traces: 0 requests; 1 not sampled\n"
    assert received.taken == []


def test_a_span_that_is_sent_twice_is_the_same(tmp_path: Path) -> None:
    log = logged(tmp_path / "a.log", *noted(Random(2)))
    once, again = (sent(log).spans for _ in range(2))
    assert once == again
    assert len({span.span_id for span in once}) == len(once)


def test_the_parts_of_a_log_have_its_spans(tmp_path: Path) -> None:
    events = make_log(Random(2).randint, n_contexts=3)
    parts = split_log(events, 2, Random(1))
    paths = [logged(tmp_path / f"a{i}.log", *part) for i, part in enumerate(parts)]
    whole = sent(logged(tmp_path / "whole.log", *events)).spans
    assert sent(*paths).spans == whole != []


def test_the_longest_of_too_many_steps_are_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128, as OpenTelemetry advises, unless its variable says otherwise. The others are counted."""
    n = 300
    events = one_request(one(0, 5), *(one(5 + i, 1) for i in range(n)))
    long = range(0, n, 3)
    shift = 0
    for event in events:
        event.t += shift
        if isinstance(event, s.StepEnd) and event.step - 1 in long:
            event.t += 10_000 + event.step
            shift += 10_000 + event.step
    log = logged(tmp_path / "a.log", *events)
    for most in (128, 50):
        ((_, _, parts),) = roots_of(sent(log))
        decode = parts["decode"]
        shown = [attributes_of(event)[OWN + "step"] for event in decode.events]
        assert len(shown) == most
        assert shown == sorted(shown)
        slowest = [step + 1 for step in long]
        assert set(slowest[-most:]) <= set(shown)
        assert attributes_of(decode)[OWN + "steps"] == n
        assert decode.dropped_events_count == n - most
        monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "50")


# --- what goes wrong ---


def test_a_collector_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    log = logged(tmp_path / "a.log", *one_request())
    with receiver() as received:
        pass
    done = instr_here("to-otlp", log, "--endpoint", received.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (f"Error: {received.url}/v1/traces takes no spans: Connection refused\n")


@pytest.mark.parametrize(("status", "why"), [(401, "HTTP status 401"), (404, "HTTP status 404")])
def test_a_collector_that_refuses_is_one_line(status: int, why: str, tmp_path: Path) -> None:
    log = logged(tmp_path / "a.log", *one_request())
    with receiver(status) as received:
        done = instr_here("to-otlp", log, "--endpoint", received.url)
    assert done.returncode == 1
    assert done.stderr == f"Error: {received.url}/v1/traces takes no spans: {why}\n"


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("localhost:4318", "localhost:4318: give an address such as http://localhost:4318"),
        ("ftp://x", "ftp://x: give an address"),
        ("http://", "http://: give an address"),
        ("http://[", "http://["),
    ],
)
def test_what_is_no_address_is_refused(endpoint: str, words: str, tmp_path: Path) -> None:
    log = logged(tmp_path / "a.log", *one_request())
    assert words in refusal("to-otlp", log, "--endpoint", endpoint)


def test_a_file_and_a_collector_are_two_commands(tmp_path: Path) -> None:
    log = logged(tmp_path / "a.log", *one_request())
    assert "not both" in refusal("to-otlp", log, "--endpoint", "http://localhost", "-o", "x")


def test_a_log_without_requests_has_no_spans(tmp_path: Path) -> None:
    log = logged(tmp_path / "a.log", *batched_log([]))
    assert sent(log).taken == []
    assert printed("to-otlp", log, "-o", "-") == ""


def test_the_example_of_the_page_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logged(tmp_path / "server.log", *one_request())
    with receiver() as received:
        words = SEND.text.replace("http://localhost:4318", received.url).split()[1:]
        assert instr_here(*words).returncode == 0
    assert len(received.spans) == 4
    assert value_of(received.taken[0].resource_spans[0].resource.attributes[0].value)


# --- requests that left the queue ---


@pytest.mark.parametrize(
    ("path", "operation"),
    [("/v1/chat/completions", "chat"), ("/completion", "text_completion"), ("", "embeddings")],
)
def test_a_request_that_left_the_queue_has_a_span(
    path: str, operation: str, tmp_path: Path
) -> None:
    """Its client left before a slot took it: it only waited, and its tokens were not counted."""
    events = one_request()
    began = next(event.t for event in events if isinstance(event, s.Mark))
    data = {"mark": 4, "task": -1, "slot": -1, "cached": 0, "computed": 0, "generated": 0,
            "drafted": 0, "accepted": 0, "verified": 0, "stream": False, "truncated": False,
            "stop": "none", "path": path, "traceparent": f"00-{TRACE}-{PARENT}-01"}  # fmt: skip
    taken = {"mark": 3, "task": 1, "slot": 0, "prompt": 5, "cached": 0, "here": 0, "elsewhere": 0,
             "before": 0, "moved": 0, "reuse": True}  # fmt: skip
    mark = s.Mark(t=began + 1, mark=4, name="request", phase="begin")
    more = [
        mark,
        s.Note(t=began + 2, name="slot", data=taken),
        s.Note(t=began + 50, name="request", data=data),
        replace(mark, t=began + 51, phase="end"),
    ]
    log = logged(tmp_path / "server.log", *sorted([*events, *more], key=lambda event: event.t))
    queue, root = (span for span in sent(log).spans if span.trace_id.hex() == TRACE)
    assert (queue.name, queue.parent_span_id, dur(queue)) == ("queue", root.span_id, 50)
    of = attributes_of(root)
    assert (root.name.split(" ")[0], of["gen_ai.operation.name"]) == (operation, operation)
    assert (dur(root), root.parent_span_id.hex(), of["error.type"]) == (50, PARENT, "cancelled")
    assert of[OWN + "wait.queue_ns"] == 50
    assert not {key for key in of if "usage" in key or key.endswith((".task", ".sequence"))}
