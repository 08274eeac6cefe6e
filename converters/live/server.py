"""Serves the page of a live session, its frames over a WebSocket, and its metrics.

Invariant: what shows text of the session lies under the random name of `serving`. It never writes,
and nothing that it gets is run.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
)
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.converters.live.frames import step_details
from llamacpp_instr.converters.live.live_session import LiveSession
from llamacpp_instr.converters.live.metrics import CONTENT_TYPE, metrics_text
from llamacpp_instr.report.serving import LOOPBACK, LoopbackServer, page_routes

IN_FLIGHT = 1 << 17
"""bytes that the system keeps for a viewer that does not read; it misses the frames after them"""


class LiveServer(LoopbackServer):
    """A server of `session`, bound to a port of the loopback interface; 0 takes a free one.

    `open_range` makes a trace of some seconds of the session, the first and the last, both
    included: it returns the address where it can be seen, or its file. Raises UsageError if the
    port is taken.
    """

    def __init__(
        self, session: LiveSession, open_range: Callable[[int, int], str | Path], port: int = 0
    ) -> None:
        super().__init__(port)
        self._session = session
        self._open_range = open_range
        self._opening = threading.Lock()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, IN_FLIGHT)
        self.metrics = f"http://{LOOPBACK}:{self.port}/metrics"

    def run(self, started: Callable[[], None]) -> None:
        """Serve until Ctrl-C or SIGTERM; `started` is called once it answers."""
        own = [
            *page_routes("llamacpp_instr.converters.live"),
            WebSocketRoute("/frames", self._frames),
            Route("/step/{step:int}", self._step),
            Route("/perfetto/{first:int}/{last:int}", self._perfetto),
        ]

        def begin() -> None:
            self._news = asyncio.Event()
            loop = asyncio.get_running_loop()

            def notify() -> None:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._ring)

            self._session.listen(notify)
            started()

        self.serve(own, begin, public=[Route("/metrics", self._metrics)])

    def _ring(self) -> None:
        """There is a new frame."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _frames(self, viewer: WebSocket) -> None:
        """Every frame from the one after `?after=`, or from a key frame on."""
        after = viewer.query_params.get("after", "-1")
        n = int(after) if after.isdecimal() and len(after) < 19 else -1
        await viewer.accept()
        sends = asyncio.create_task(self._send(viewer, n))
        # a viewer sends nothing; reading notices that it has left
        while (await viewer.receive())["type"] != "websocket.disconnect":
            pass
        sends.cancel()

    async def _send(self, viewer: WebSocket, n: int) -> None:
        """Send a viewer what comes after its `n`-th frame, as fast as it reads."""
        frame: tuple[int, bytes] | None
        with suppress(WebSocketDisconnect, RuntimeError):
            while True:
                news = self._news
                if self._session.is_behind(n):
                    frame = await asyncio.to_thread(self._session.key_frame, n)
                else:
                    frame = self._session.frame_after(n)
                if frame is not None:
                    n, data = frame
                    await viewer.send_text(data.decode())
                elif self._session.over:
                    await viewer.close()
                    return
                else:
                    await news.wait()

    async def _step(self, request: Request) -> Response:
        step = request.path_params["step"]
        found = await asyncio.to_thread(self._session.look, lambda state: step_details(state, step))
        if found is None:
            return PlainTextResponse(f"step {step} is not kept any more", 404)
        return JSONResponse(found)

    async def _perfetto(self, request: Request) -> Response:
        """Leads to the trace of some seconds, or sends it."""
        first, last = request.path_params["first"], request.path_params["last"]
        try:
            # the end of the server does not wait for it
            found = await to_thread.run_sync(self._trace_of, first, last, abandon_on_cancel=True)
        except InstrError as error:
            return PlainTextResponse(str(error), 404)
        if isinstance(found, Path):
            return FileResponse(found, filename=f"{first}-{last}{found.suffix}")
        return RedirectResponse(found, 303)

    def _trace_of(self, first: int, last: int) -> str | Path:
        with self._opening:  # one after the other: it takes a CPU
            return self._open_range(first, last)

    async def _metrics(self, _request: Request) -> Response:
        text = await asyncio.to_thread(self._session.look, metrics_text)
        return Response(text, media_type=CONTENT_TYPE)
