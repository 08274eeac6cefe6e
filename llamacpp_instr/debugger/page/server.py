"""Serves the debugger's page, and the protocol over its WebSocket.

Invariant: both lie under the random name of `serving`, which checks Host and Origin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from llamacpp_instr.debugger.dap.framing import ProtocolError
from llamacpp_instr.debugger.dap.transports import PATIENCE_S, WAITING
from llamacpp_instr.debugger.page.shared_run import SharedRun
from llamacpp_instr.lab.view.server import CHARTS, weight_routes
from llamacpp_instr.lab.view.tensors import Tensors
from llamacpp_instr.report.serving import LoopbackServer, page_routes

SCRIPTS = ("page", "protocol", "breakpoints", "listing", "tensor", "looks", "parts", "tabs")
PAGE = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    **{f"{name}.js": (f"{name}.js", "text/javascript") for name in SCRIPTS},
}


class DebugServer(LoopbackServer):
    """A server of `shared`, bound to a port of the loopback interface; 0 takes a free one.

    Raises UsageError if the port is taken.
    """

    def __init__(self, shared: SharedRun, port: int = 0, tensors: Tensors | None = None) -> None:
        super().__init__(port)
        self._shared = shared
        self._tensors = tensors
        """the weights of the tab"""

    def run(self, started: Callable[[], None]) -> None:
        """Serve until a browser ends the session, Ctrl-C or SIGTERM; `started` is called once it
        answers."""
        own = [
            *page_routes("llamacpp_instr.debugger.page", PAGE),
            WebSocketRoute("/dap", self._talk),
        ]
        if self._tensors is None:
            self.serve(own, started)
            return
        routes = [*weight_routes(self._tensors), Route("/begin", self._begin, methods=["POST"])]
        own += [
            *page_routes("llamacpp_instr.converters.live", CHARTS),
            Mount("/weights", routes=routes),
        ]
        try:
            self.serve(own, started)
        finally:
            self._tensors.stop()

    async def _begin(self, _request: Request) -> Response:
        """Measures the weights when their tab is first opened, because the model is running."""
        assert self._tensors is not None
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
        if self._shared.is_over:
            await asyncio.sleep(0)
            written = asyncio.create_task(waiting.join())
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait((written, writer), timeout=PATIENCE_S, return_when=first)
            written.cancel()
        writer.cancel()
        reader.cancel()
        with suppress(RuntimeError, WebSocketDisconnect, asyncio.TimeoutError):
            await asyncio.wait_for(browser.close(), PATIENCE_S)
        if self._shared.is_over:
            self.stop()

    async def _read(self, browser: WebSocket, send: Callable[[bytes], None]) -> None:
        """Answers messages until the browser leaves or has ended the session."""
        with suppress(WebSocketDisconnect, ProtocolError, KeyError, RuntimeError):
            while not self._shared.is_over:
                data = await browser.receive_text()
                await asyncio.to_thread(self._shared.handle, send, data)


async def _write(browser: WebSocket, waiting: asyncio.Queue[bytes]) -> None:
    with suppress(WebSocketDisconnect, RuntimeError):
        while True:
            await browser.send_text((await waiting.get()).decode())
            waiting.task_done()
