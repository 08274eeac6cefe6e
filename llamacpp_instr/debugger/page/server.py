"""Serves the debugger's page, and the protocol over its WebSocket, to any number of browsers.

Invariant: both lie under the random name of `serving`, which checks Host and Origin. A browser that
connects or reconnects first gets `instr/state`, the sum of the events so far, and shows that stop.
"""

from __future__ import annotations

import asyncio
import shlex
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Annotated, Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.attention import attention
from llamacpp_instr.debugger.dap.adapter import Adapter, Json, Launch, ProtocolError
from llamacpp_instr.debugger.dap.transports import PATIENCE_S, WAITING, decode_message
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.residual import most_probable
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import heat_map, read, tensor_at
from llamacpp_instr.lab.view.tensors import Tensors, weight_routes
from llamacpp_instr.report.serving import LoopbackServer, page_routes

TEXT_KEPT = 1 << 16  # characters at the end of the generated text
LINES_KEPT = 200  # about the run, not what the model generates
MOST_TOKENS = 1024  # tokens of a compute, or cells, in one answer: the last ones
SMALL, LARGE = (24, 48), (128, 256)
"""rows and columns of a picture of attention, of every head and of one"""
_DECIMALS = 6  # of a share of attention
_CHANGES = ("set", "zero", "scale", "noise", "replace", "ablate")
_GOES_ON = ("continue", "next", "stepIn", "stepOut")

Best = Annotated[int, msgspec.Meta(ge=1, le=20)]
Send = Callable[[bytes], None]
"""gives a message to one browser; called from any thread, and never waits"""


class SharedRun:
    """A debugged run for all browsers: an answer goes to the one that asked, an event to all."""

    def __init__(self, launch: Launch, has_weights: bool = False) -> None:
        self.adapter = PageAdapter(self._send, launch)
        self.problem = ""
        """why it failed, empty if it did not"""
        self.on_quit: Callable[[], None] = lambda: None
        """called when a browser ends the session, before the run is ended"""
        self._started = threading.Event()
        self._requests = threading.Lock()  # held while a request is answered
        self._lock = threading.RLock()  # of what follows
        self._browsers: list[Send] = []
        self.state: Json = {
            "text": "", "lines": [], "stopped": None, "over": False, "exitCode": 0,
            "breakpoints": {"lines": {}, "functions": [], "filters": []},
            "changes": [], "comparison": None, "weights": has_weights,
        }  # fmt: skip
        """what a browser that joins is told; `lines` are about the run, not what it generates"""

    def start(self, breakpoints: Sequence[str], wait: bool = True) -> None:
        """Launch the run and, with `wait`, wait until its first compute begins. Raises `UsageError`
        if it is refused, or ends before that."""
        self._ask("initialize", {"supportsVariablePaging": True})
        self._ask("launch", {})
        wanted = [{"name": text} for text in breakpoints]
        self._ask("setFunctionBreakpoints", {"breakpoints": wanted})
        self._ask("configurationDone", {})
        if wait:
            self._started.wait()
        if self.problem:
            raise UsageError(self.problem)

    def join(self, browser: Send) -> None:
        """Add a browser, and tell it what has happened so far."""
        with self._lock:
            self._browsers.append(browser)
            browser(_event("instr/state", self.state))

    def leave(self, browser: Send) -> None:
        """Send it nothing more."""
        with self._lock:
            self._browsers = [one for one in self._browsers if one is not browser]

    def handle(self, browser: Send, data: str) -> None:
        """Answer a message of a browser. Raises `ProtocolError` if it is not one."""
        self._answer(decode_message(data), browser)

    def tell(self, name: str, body: Json, but: Send | None = None) -> None:
        """Send an event of our own to every browser `but` one."""
        with self._lock:
            if name == "instr/comparison":
                self.state["comparison"] = body
            for browser in self._browsers:
                if browser is not but:
                    browser(_event(name, body))

    # --- between the browsers and the adapter ---

    def _ask(self, command: str, arguments: Json) -> None:
        """Raises `UsageError` with the adapter's reason if it refuses."""
        message = {"seq": 0, "type": "request", "command": command, "arguments": arguments}
        answer = self._answer(message, None)
        assert answer is not None
        if not answer["success"]:
            raise UsageError(answer["message"].removeprefix("launch: "))

    def _answer(self, message: Json, browser: Send | None) -> Json | None:
        """The adapter's answer, which the browser gets before the model goes on."""
        answers: list[Json] = []

        def reply(answer: Json) -> None:
            answers.append(answer)
            if answer["success"] and answer["command"] in _GOES_ON:
                # the next stop may come at once
                with self._lock:
                    self.state["stopped"] = None
                    self.tell("continued", {"threadId": 1}, browser)
            if browser is not None:
                browser(msgspec.json.encode(answer))

        if message.get("command") == "disconnect":
            self.on_quit()
        with self._requests:
            self.adapter.handle(message, reply)
        answer = answers[0] if answers else None
        if answer is not None and answer["success"]:
            self._note(answer["command"], message.get("arguments"), browser)
        return answer

    def _send(self, event: Json) -> None:
        """Keep what the adapter says, and tell every browser."""
        data, state = msgspec.json.encode(event), self.state
        name, body = event["event"], event.get("body") or {}
        with self._lock:
            if name == "output" and body["category"] == "stdout":
                state["text"] = (state["text"] + body["output"])[-TEXT_KEPT:]
            elif name == "output":
                state["lines"] = [*state["lines"], body["output"].rstrip("\n")][-LINES_KEPT:]
                if body["category"] == "stderr" and not self._started.is_set():
                    self.problem = body["output"].strip().removeprefix("Error: ")
            elif name in ("stopped", "continued"):
                state["stopped"] = body if name == "stopped" else None
            elif name == "exited":
                state |= {"over": True, "stopped": None, "exitCode": body["exitCode"]}
            if name in ("loadedSource", "exited"):
                self._started.set()
            for browser in self._browsers:
                browser(data)

    def _note(self, command: str, arguments: Any, browser: Send | None) -> None:
        """Keep what a request has done, and tell it to the other browsers."""
        given = arguments or {}
        with self._lock:
            known, changes = self.state["breakpoints"], self.state["changes"]
            if command == "setBreakpoints":
                reference = str(given["source"].get("sourceReference", ""))
                known["lines"][reference] = given.get("breakpoints", [])
            elif command == "setFunctionBreakpoints":
                known["functions"] = given.get("breakpoints", [])
            elif command == "setExceptionBreakpoints":
                known["filters"] = given.get("filters", [])
            elif command == "evaluate" and _first_word(given["expression"]) in _CHANGES:
                changes.append(given["expression"].strip())
                self.tell("instr/changes", {"changes": changes})
            if command.endswith("Breakpoints"):
                self.tell("instr/breakpoints", known, browser)


def _event(name: str, body: Json) -> bytes:
    return msgspec.json.encode({"seq": 0, "type": "event", "event": name, "body": body})


def _first_word(text: str) -> str:
    try:
        return (shlex.split(text) or [""])[0]
    except ValueError:
        return ""


class PageAdapter(Adapter):
    """Answers what the page asks for beyond the protocol, because a console's text cannot be drawn.
    It follows its debugger, to see the tokens of every compute."""

    def __init__(self, send: Callable[[Json], None], launch: Launch) -> None:
        super().__init__(send, launch)
        self._text = self.commands.text
        self._caches: dict[int, dict[int, tuple[int, int]]] = {}
        """position and token by cell, of each cache"""
        self._graph: LiveGraph | None = None
        self._writes: dict[int, tuple[int, int]] = {}
        self.debugger.followers.append(self)

    def wants(self, graph: LiveGraph, ubatch: Ubatch) -> Collection[int]:
        """No nodes; notes which tokens the compute is going to write into which cells."""
        if graph is not self._graph:
            self._graph, self._writes = graph, _cache_writes(graph)
        if ubatch.tokens is None or ubatch.positions is None:
            return ()
        for number, address in dict(self._writes.values()).items():
            cells = read(address).reshape(-1)
            if len(cells) == ubatch.n_tokens:
                cache = self._caches.setdefault(number, {})
                entries = zip(cells, ubatch.positions, ubatch.tokens, strict=True)
                cache.update((int(cell), (int(at), int(token))) for cell, at, token in entries)
        return ()

    def passed(self, stop: Stop) -> None:
        """Never called."""

    def do_instr_tokens(self) -> Json:
        """`tokens` of the compute, and `cells` of the first cache: lists of number or cell,
        position, token, text."""
        cells = [(cell, *entry) for cell, entry in sorted(self._caches.get(0, {}).items())]
        return {
            name: [[*row, self._text(row[-1])] for row in rows[-MOST_TOKENS:]]
            for name, rows in (("tokens", self._stopped().ubatch.numbered()), ("cells", cells))
        }

    def do_instr_lens(self, token: int = -1, top: Best = 5) -> Json:
        """For each layer so far the most probable tokens: lists of token, text, probability."""
        guesses = self.commands.lens.look(self._stopped(), token)
        best = [{"layer": of.layer, "best": self._best(of.top(top))} for of in guesses]
        return {"layers": best}

    def do_instr_attention(self, layer: int | None = None, head: int | None = None) -> Json:
        """A picture of each head, or of one: rows are tokens, columns cells of the cache; each
        picture's cell is the largest share of those that it covers. `rows` and `cells` are the
        texts of their tokens, null where they are not known."""
        stop = self._stopped()
        seen = attention(stop, layer)
        n_heads, n_rows, _ = seen.weights.shape
        heads = range(n_heads)
        if head is not None and head not in heads:
            raise UsageError(f"there is no head {head}; there are 0 to {n_heads - 1}")
        shown, size = (heads, SMALL) if head is None else ([head], LARGE)
        maps = []
        for number in shown:
            values, rows, columns = heat_map(seen.weights[number, :, : seen.used], *size)
            maps.append(
                {
                    "head": number, "values": np.round(values, _DECIMALS).tolist(),
                    "rowEdges": rows.tolist(), "columnEdges": columns.tolist(),
                }
            )  # fmt: skip
        cache_number, _ = self._writes.get(seen.layer, (-1, 0))
        cache = self._caches.get(cache_number, {})
        tokens = [token for *_, token in stop.ubatch.numbered()]
        known = [self._text(token) for token in tokens] if len(tokens) == n_rows else None
        return {
            "layer": seen.layer, "computed": seen.computed, "sinks": seen.sinks,
            "heads": n_heads, "maps": maps, "rows": known or [None] * n_rows,
            "cells": [self._text(cache[at][1]) if at in cache else None for at in range(seen.used)],
        }  # fmt: skip

    def do_instr_next(self) -> Json:
        """The most probable next tokens, at the logits."""
        stop = self._stopped()
        values = stop.values() if stop.node.name == "result_output" else None
        if values is None or not values.size:
            raise UsageError("the logits have not been computed yet")
        return {"best": self._best(most_probable(np.atleast_2d(values)[-1], 10))}

    def _best(self, best: Iterable[tuple[int, float]]) -> list[list[Any]]:
        return [[token, self._text(token), share] for token, share in best]


def _cache_writes(graph: LiveGraph) -> dict[int, tuple[int, int]]:
    """By layer: the number of the cache of its keys, and the address of the tensor with the cell of
    each token. Caches with several streams are left out: their cells are not those of a row."""
    found: dict[int, tuple[int, int]] = {}
    numbers: dict[int, int] = {}
    for node in graph.nodes:
        if node.op != "SET_ROWS" or len(node.sources) != 3:
            continue
        cells, cache = node.sources[1:]
        if cache.name.startswith("cache_k") and tensor_at(cache.address).ne[2] == 1:
            number = numbers.setdefault(cells.address, len(numbers))
            found[node.layer] = (number, cells.address)
    return found


class DebugServer(LoopbackServer):
    """A server of `shared`; the rest is as in `LoopbackServer`."""

    def __init__(self, shared: SharedRun, port: int = 0, tensors: Tensors | None = None) -> None:
        super().__init__(port)
        self._shared = shared
        self._tensors = tensors
        """the weights of the tab"""

    def run(self, started: Callable[[], None]) -> None:
        """Serve until a browser ends the session, Ctrl-C or SIGTERM; `started` is as in `serve`."""
        own: list[BaseRoute] = [
            *page_routes("llamacpp_instr.debugger.page"),
            WebSocketRoute("/dap", self._talk),
        ]
        with ExitStack() as stack:
            if tensors := self._tensors:
                stack.callback(tensors.stop)
                begin = Route("/begin", self._begin, methods=["POST"])
                own.append(Mount("/weights", routes=[*weight_routes(tensors), begin]))
            self.serve(own, started)

    async def _begin(self, _request: Request) -> Response:
        """Measures the weights when their tab is first opened: the model is running."""
        assert self._tensors
        self._tensors.start()
        return Response(status_code=204)

    async def _talk(self, browser: WebSocket) -> None:
        await browser.accept()
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[bytes] = asyncio.Queue(WAITING)

        def put(data: bytes) -> None:
            try:
                waiting.put_nowait(data)
            except asyncio.QueueFull:
                writer.cancel()

        def send(data: bytes) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(put, data)

        writer = asyncio.create_task(_write(browser, waiting))
        reader = asyncio.create_task(self._read(browser, send))
        self._shared.join(send)
        await asyncio.wait((writer, reader), return_when=asyncio.FIRST_COMPLETED)
        self._shared.leave(send)
        if self._shared.adapter.is_over:
            await asyncio.sleep(0)
            written = asyncio.create_task(waiting.join())
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait((written, writer), timeout=PATIENCE_S, return_when=first)
            written.cancel()
        writer.cancel()
        reader.cancel()
        with suppress(RuntimeError, WebSocketDisconnect, asyncio.TimeoutError):
            await asyncio.wait_for(browser.close(), PATIENCE_S)
        if self._shared.adapter.is_over:
            self.stop()

    async def _read(self, browser: WebSocket, send: Callable[[bytes], None]) -> None:
        """Answers messages until the browser leaves or has ended the session."""
        with suppress(WebSocketDisconnect, ProtocolError, KeyError, RuntimeError):
            while not self._shared.adapter.is_over:
                data = await browser.receive_text()
                await asyncio.to_thread(self._shared.handle, send, data)


async def _write(browser: WebSocket, waiting: asyncio.Queue[bytes]) -> None:
    with suppress(WebSocketDisconnect, RuntimeError):
        while True:
            await browser.send_text((await waiting.get()).decode())
            waiting.task_done()
