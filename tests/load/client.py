"""Sends requests, and keeps what must not differ in an answer: all but its id and the time."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from tests.load.mix import Request
from tests.load.server import PATIENCE_S, Server


@dataclass(frozen=True)
class Answer:
    status: int
    pieces: tuple[str, ...]
    """JSON of the body, or of every event of the stream, `[DONE]` included"""

    @property
    def text(self) -> str:
        return "".join(_text(json.loads(piece)) for piece in self.pieces if piece != "[DONE]")

    def usage(self, key: str) -> int:
        """A figure of the server's own count; only in bodies that are not streams."""
        [body] = self.pieces
        value = json.loads(body)["usage"][key]
        assert isinstance(value, int)
        return value

    @property
    def finished(self) -> str | None:
        """Why the model stopped: `stop` (its own end) or `length`."""
        [body] = self.pieces
        choices = json.loads(body).get("choices")
        return choices[0]["finish_reason"] if choices else None


def ask(server: Server, request: Request) -> Answer:
    """Send a request and read the answer, or the part that the client waits for."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        connection.request("POST", request.path, request.body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if not response.getheader("content-type", "").startswith("text/event-stream"):
            return Answer(response.status, (_without_names(json.loads(response.read())),))
        pieces: list[str] = []
        while line := response.readline():
            if not line.startswith(b"data: "):
                continue  # empty lines, and comments that keep the connection open
            data = line.removeprefix(b"data: ").decode().strip()
            pieces.append(data if data == "[DONE]" else _without_names(json.loads(data)))
            if len(pieces) == request.leave_after:
                break
        return Answer(response.status, tuple(pieces))
    finally:
        connection.close()


def _without_names(value: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in value.items() if k not in ("id", "created")})


def _text(value: dict[str, Any]) -> str:
    choices = value.get("choices")
    if not choices:
        return ""
    choice = choices[0]
    if value["object"].startswith("chat."):
        return (choice.get("message") or choice.get("delta") or {}).get("content") or ""
    return choice["text"]
