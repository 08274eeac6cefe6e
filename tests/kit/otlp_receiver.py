"""A collector for tests: it takes OTLP over HTTP, as OpenTelemetry's own messages, and keeps it."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


def value_of(value: Any) -> Any:
    """The Python value of an AnyValue."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return list(map(value_of, value.array_value.values))
    return getattr(value, kind)


def attributes_of(of: Any) -> dict[str, Any]:
    """The attributes of a span, an event or a resource."""
    return {pair.key: value_of(pair.value) for pair in of.attributes}


@dataclass
class Receiver:
    """What arrived, as HTTP requests."""

    status: int = 200
    url: str = ""
    headers: list[dict[str, str]] = field(default_factory=list)
    taken: list[ExportTraceServiceRequest] = field(default_factory=list)
    came: threading.Event = field(default_factory=threading.Event)

    @property
    def spans(self) -> list[Any]:
        return [span for of in self.taken for span in spans_of(of)]

    @property
    def resources(self) -> list[dict[str, Any]]:
        return [attributes_of(of.resource) for r in self.taken for of in r.resource_spans]


def spans_of(request: ExportTraceServiceRequest) -> list[Any]:
    """The spans of one request, or of a line of a file."""
    return [s for of in request.resource_spans for scope in of.scope_spans for s in scope.spans]


@contextmanager
def receiver(status: int = 200) -> Iterator[Receiver]:
    """A collector on a free port that answers with a status; others than 200 take nothing."""
    received = Receiver(status)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            if received.status == 200:
                received.headers.append(dict(self.headers))
                received.taken.append(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(received.status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
            received.came.set()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield received
        finally:
            server.shutdown()
            serving.join()
