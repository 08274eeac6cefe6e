"""The requests of logs as OpenTelemetry spans, in a file or for a collector.

Names are those of the semantic conventions for generative AI
(https://github.com/open-telemetry/semantic-conventions-genai, docs/gen-ai/client-inference.md);
what these lack begins with `llamacpp_instr.`. Spans have no text of prompts and answers.

Invariant: a request is one span, from its arrival to its end; its children `queue`, `prefill` and
`decode` follow each other without a gap. One that left the queue has only the first. Ids are made
from the session and the request, so a span that is sent twice is the same span.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath
from random import Random
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import numpy as np
from google.protobuf.json_format import MessageToDict
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.exports.names import host_of, name_of
from llamacpp_instr.log.ended_requests import Ended
from llamacpp_instr.log.requests import (
    Request,
    Served,
    find_requests,
    left_requests,
    server_context,
)
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.schema import SessionStart
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.log.waits import Waits, waits_of

BATCH = 512
"""spans of one line or one request to a collector, as in OpenTelemetry's own processor"""
FINISH = {"eos": "stop", "word": "stop", "limit": "length", "none": "error"}
"""why llama-server stopped -> `gen_ai.response.finish_reasons`"""

Attributes = dict[str, str | int | float | bool | Sequence[str]]


class SessionSpans:
    """Makes the spans of the requests of one session; `processor` gets each one when it ends.

    OpenTelemetry's variables of the environment change attributes of the resource, what is sampled
    (`OTEL_TRACES_SAMPLER`; by default what the client samples), and how many events a span has.
    """

    def __init__(self, start: SessionStart, processor: SpanProcessor) -> None:
        self._start = start
        self._ids = _Ids()
        limits = SpanLimits()
        self._most = limits.max_events
        own = Resource(_resource(start)).merge(OTELResourceDetector().detect())
        provider = TracerProvider(
            resource=Resource.create().merge(own), id_generator=self._ids, span_limits=limits,
            shutdown_on_exit=False,
        )  # fmt: skip
        provider.add_span_processor(processor)
        self._tracer = provider.get_tracer("llamacpp_instr")

    def make(self, request: Request, steps: Table, waits: Waits, model: str) -> bool:
        """Make the spans of a request, whose steps are rows of `steps`; return if it is sampled."""
        start, served = self._start, request.served
        self._ids.seed(f"{start.id} {start.wall} {request.ctx} {request.seq} {request.begin}")
        parent = {"traceparent": served.traceparent} if served else {}
        begin, end = request.first, max(request.end, request.begin)
        what = _what(served, model)
        root = self._begin(
            f"{what['gen_ai.operation.name']} {model}".rstrip(), begin, what,
            TraceContextTextMapPropagator().extract(parent, Context()),
            SpanKind.SERVER if served else SpanKind.INTERNAL,
        )  # fmt: skip
        root.set_attributes({**_usage(request), **_own(request, waits)})
        if served and served.stop == "none":
            root.set_status(Status(StatusCode.ERROR, served.end))
        within = set_span_in_context(root, Context())
        first = request.token_times[0] if request.token_times else end
        parts = [("prefill", request.begin, first)] if request.ctx >= 0 else []
        if request.arrival >= 0:
            parts.insert(0, ("queue", request.arrival, request.begin))
        if request.token_times:
            parts.append(("decode", first, end))
        rows = np.array(request.steps, np.int64)
        is_prefill = steps["begin"][rows] < first
        of_part = {"prefill": rows[is_prefill], "decode": rows[~is_prefill]}
        for name, since, until in parts:
            child = self._begin(name, since, {}, within, SpanKind.INTERNAL)
            if name in of_part:
                self._add_steps(child, steps.rows(of_part[name]))
            child.end(self._wall(until))
        root.end(self._wall(end))
        return root.get_span_context().trace_flags.sampled

    def _begin(
        self, name: str, t: int, attributes: Attributes, within: Context, kind: SpanKind
    ) -> Span:
        return self._tracer.start_span(
            name, within, kind, attributes=attributes, start_time=self._wall(t)
        )

    def _add_steps(self, span: Span, steps: Table) -> None:
        """Add each step as an event. A span keeps the latest events that it is given and counts the
        others, so if there are too many, the shortest come first."""
        span.set_attribute("llamacpp_instr.steps", len(steps))
        dur = steps["end"] - steps["begin"]
        n_over = max(len(steps) - (self._most or len(steps)), 0)
        by_dur = np.argsort(dur, kind="stable")
        order = np.concatenate([by_dur[:n_over], np.sort(by_dur[n_over:])])
        of = steps.rows(order).tuples("step", "begin", "n_tokens", "n_seqs")
        for ns, (step, begin, tokens, seqs) in zip(dur[order].tolist(), of, strict=True):
            about = {
                "llamacpp_instr.step": step,
                "llamacpp_instr.step.duration_ns": ns,
                "llamacpp_instr.step.tokens": tokens,
                "llamacpp_instr.step.sequences": seqs,
            }
            span.add_event("step", about, self._wall(begin))

    def _wall(self, t: int) -> int:
        """The time of day, in ns since 1970."""
        return max(self._start.wall + t - self._start.t, 0)


def _resource(start: SessionStart) -> Attributes:
    """What a session is, in OpenTelemetry's words."""
    program = PurePath(start.process.argv[0]).name if start.process.argv else "llama.cpp"
    return {
        "service.name": program,
        "service.version": start.producer.llama_cpp,
        "service.instance.id": start.id,
        "host.name": host_of(start),
        "host.cpu.model.name": start.host.cpu,
        "os.description": start.host.os,
        "process.pid": start.process.pid,
        "process.executable.name": program,
        "llamacpp_instr.level": start.level,
    }


def _what(served: Served | None, model: str) -> Attributes:
    """What a sampler may decide by."""
    return {
        "gen_ai.operation.name": served.operation if served else "text_completion",
        "gen_ai.provider.name": "llama.cpp",
        **({"gen_ai.request.model": model} if model else {}),
    }


def _usage(request: Request) -> Attributes:
    """What the conventions have words for."""
    found: Attributes = {}
    if request.ctx >= 0:  # else its tokens were not counted
        found = {
            "gen_ai.usage.input_tokens": request.prompt + request.reused,
            "gen_ai.usage.cache_read.input_tokens": request.reused,
            "gen_ai.usage.output_tokens": len(request.token_times),
        }
    if (of := request.served) is None:
        return found
    if of.stop in FINISH:
        found["gen_ai.response.finish_reasons"] = [FINISH[of.stop]]
    if of.stop == "none":
        found["error.type"] = of.end
    if of.stream:
        found["gen_ai.request.stream"] = True
        if (ns := request.to_first_token) is not None:
            found["gen_ai.response.time_to_first_chunk"] = ns / 1e9
    return found


def _own(request: Request, waits: Waits) -> Attributes:
    """What they have no words for: where its time went, and where it ran."""
    found: Attributes = {
        f"llamacpp_instr.wait.{name}_ns": ns for name, ns in waits._asdict().items()
    }
    if request.ctx >= 0:
        found["llamacpp_instr.context"] = request.ctx
        found["llamacpp_instr.sequence"] = request.seq
    if request.name:
        found["llamacpp_instr.mark"] = request.name
    if (ns := request.to_first_token) is not None:
        found["llamacpp_instr.time_to_first_token_ns"] = ns
    if (of := request.served) is not None and of.slot >= 0:
        found["llamacpp_instr.task"] = of.task
        found["llamacpp_instr.drafted_tokens"] = of.drafted
        found["llamacpp_instr.accepted_tokens"] = of.accepted
    return found


class _Ids(IdGenerator):
    """Ids that follow from a seed."""

    def seed(self, text: str) -> None:
        self._random = Random(text)

    def generate_span_id(self) -> int:
        return self._random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        return self._random.getrandbits(128) or 1


# --- where they go ---

Deliver = Callable[[Sequence[ReadableSpan]], object]
"""takes spans that have ended; raises InstrError if it cannot"""


def export_sessions(
    sessions: Sequence[Session], deliver: Deliver, on_progress: OnProgress
) -> tuple[int, int]:
    """Deliver the spans of all requests, BATCH at a time. Returns the number of requests, and of
    those that are sampled: only these have spans. `on_progress` gets requests."""
    found = []
    for session in sessions:
        steps, requests = find_requests(session)
        left = [request for request in left_requests(session) if request.served]
        found.append((session, steps, [*requests, *left]))
    n_all, n_sampled, done = sum(len(requests) for *_, requests in found), 0, 0
    for session, steps, requests in found:
        batches = _Batches(deliver)
        spans = SessionSpans(session.start, batches)
        for request, waits in zip(requests, waits_of(requests, steps), strict=True):
            context = session.contexts.get(request.ctx) or server_context(session.contexts.values())
            model = session.models.get(context.model) if context else None
            n_sampled += spans.make(request, steps, waits, name_of(model) if model else "")
            done += 1
            on_progress(done, n_all)
        batches.force_flush()
    return n_all, n_sampled


class _Batches(SpanProcessor):
    """Delivers spans as they end, BATCH at a time."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)
        if len(self._spans) >= BATCH:
            self.force_flush()

    def force_flush(self, timeout_millis: int = 0) -> bool:  # noqa: ARG002
        if self._spans:
            self._deliver(self._spans)
            self._spans = []
        return True


def json_lines(file: BinaryIO) -> Deliver:
    """Delivers to a file, as a line of OTLP/JSON each
    (https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/). It differs from Protobuf's
    JSON in its ids, which are hexadecimal, and in its enumerations, which are numbers."""

    def write(spans: Sequence[ReadableSpan]) -> None:
        whole: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        for resource in whole["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    for key in {"traceId", "spanId", "parentSpanId"} & span.keys():
                        span[key] = b64decode(span[key]).hex()
        file.write(json.dumps(whole, separators=(",", ":")).encode() + b"\n")

    return write


class Collector:
    """A collector that speaks OTLP over HTTP, at the address of its server or of its traces. The
    variables OTEL_EXPORTER_OTLP_* of the environment set headers, certificates, the compression and
    the timeout. Raises UsageError for an invalid address or variable."""

    def __init__(self, endpoint: str) -> None:
        try:
            parts = urlsplit(endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise UsageError(f"{endpoint}: give an address such as http://localhost:4318")
            self.url = endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
            self._exporter = OTLPSpanExporter(self.url)
        except ValueError as error:
            raise UsageError(f"{endpoint}, OTEL_EXPORTER_OTLP_*: {error}") from None
        self._reason = _Reason(logging.WARNING)
        logging.getLogger("opentelemetry").addHandler(self._reason)

    def deliver(self, spans: Sequence[ReadableSpan]) -> None:
        """Raises InstrError if the collector does not take them."""
        self._reason.text = ""
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise InstrError(f"{self.url} takes no spans: {self._reason.text or 'no answer'}")

    def close(self) -> None:
        """Also ends a `deliver` of another thread."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        logging.getLogger("opentelemetry").removeHandler(self._reason)


class _Reason(logging.Handler):
    """Keeps why the exporter failed, which it only logs."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        found = re.search(r"\[Errno -?\d+\] ([\w ]+)|code: (\d+)", message)
        if found:
            self.text = found[1] or f"HTTP status {found[2]}"
        elif "max retries" not in message:  # it logs the reason before that
            self.text = self.text or message


LAST_S = 2.0
"""how long the last spans may take once nothing follows"""


@contextmanager
def sending(endpoint: str, warn: Callable[[str], object]) -> Iterator[Callable[[Resolver], Ended]]:
    """Sends requests that end to a collector, in a thread of its own; the block gets the function
    that makes a sender for the log of a resolver. `warn` gets one line when the collector first
    takes no spans: these are lost, later ones are sent. Raises what `Collector` raises.
    """
    collector = Collector(endpoint)
    processor = BatchSpanProcessor(_OneWarning(collector, warn))

    def sender(refs: Resolver) -> Ended:
        spans: list[SessionSpans] = []

        def ended(request: Request, steps: Table) -> None:
            if not spans:
                spans.append(SessionSpans(refs.start, processor))
            (waits,) = waits_of([request], steps)
            known = refs.contexts.get(request.ctx)
            context = (
                known.event if known else server_context(of.event for of in refs.contexts.values())
            )
            model = name_of(refs.models[context.model].event) if context else ""
            spans[0].make(request, steps, waits, model)

        return ended

    try:
        yield sender
    finally:
        last = threading.Thread(target=processor.force_flush, daemon=True)
        last.start()
        last.join(LAST_S)
        collector.close()
        last.join()
        processor.shutdown()  # type: ignore[no-untyped-call]


class _OneWarning(SpanExporter):
    """Delivers to a collector, and continues if that takes no spans."""

    def __init__(self, collector: Collector, warn: Callable[[str], object]) -> None:
        self._collector, self._warn = collector, warn
        self._warned = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            self._collector.deliver(spans)
        except InstrError as error:
            if not self._warned:
                self._warned = True
                self._warn(f"{error}; they are lost, and the next will be sent")
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS
