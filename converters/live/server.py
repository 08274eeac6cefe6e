"""Serves the page of a live session, its frames over a WebSocket, its metrics for Prometheus, and
ranges of its log in Perfetto's UI, as `instr view` does.

Invariant: what shows text of the session lies under the random name of `serving`. The server never
writes, and runs nothing that it gets.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from anyio import to_thread
from prometheus_client import CONTENT_TYPE_LATEST
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

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.system import python, temporary_directory
from llamacpp_instr.converters.live.frames import step_details
from llamacpp_instr.converters.live.live_session import LiveSession
from llamacpp_instr.converters.live.metrics import metrics_text
from llamacpp_instr.log.runs import FollowedLog
from llamacpp_instr.report.perfetto_ui import FIRST_SIGHT, UiServer, find_ui
from llamacpp_instr.report.serving import LOOPBACK, LoopbackServer, page_routes

IN_FLIGHT = 1 << 17
"""bytes that the system keeps for a viewer that does not read; it misses the frames after them"""
OPEN = 4
"""traces at once: the latest; a tab that shows an older one has read it"""

_CONVERT = "import sys; from llamacpp_instr.cli import main; main(sys.argv[1:])"


class LiveServer(LoopbackServer):
    """A server of `session`, bound to a port of the loopback interface; 0 takes a free one.

    `open_range` makes a trace of some seconds of the session, from the first to the last, both
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
            return PlainTextResponse(f"step {step} is no longer kept", 404)
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
        with self._opening:  # one at a time: it takes a CPU
            return self._open_range(first, last)

    async def _metrics(self, _request: Request) -> Response:
        text = await asyncio.to_thread(self._session.look, metrics_text)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


class RangeOpener(ExitStack):
    """Traces of ranges of a log, each with a server of Perfetto's UI, until the block ends.

    The log is only read, by a process of its own for each conversion.
    """

    def __init__(self, session: LiveSession, log: FollowedLog) -> None:
        super().__init__()
        self._session, self._log = session, log
        self._folder: Path | None = None
        self._files = self.enter_context(ExitStack())
        self._count = 0
        self._shown: deque[ExitStack] = deque()
        self._child: subprocess.Popen[str] | None = None
        self._closed = False
        self.callback(self._end)

    def _end(self) -> None:
        self._closed = True
        if self._child is not None:
            self._child.kill()
        while self._shown:
            self._shown.popleft().close()

    def open(self, first: int, last: int) -> str | Path:
        """The address at which Perfetto's UI shows these seconds of the session; the file of the
        trace if the UI is not installed. Raises UsageError if no step of that time is known,
        InstrError if the conversion fails."""
        trace = self._convert(first, last)
        self._shown.append(shown := ExitStack())
        if len(self._shown) > OPEN:
            self._shown.popleft().close()
        shown.callback(trace.unlink, missing_ok=True)
        try:
            server = UiServer(trace, find_ui())
        except UsageError:
            return trace
        serving = threading.Thread(target=server.run, daemon=True)
        serving.start()
        shown.callback(serving.join)
        shown.callback(server.stop)
        return server.opening(FIRST_SIGHT)

    def _convert(self, first: int, last: int) -> Path:
        start, steps = self._session.look(
            lambda state: (state.start, state.steps_between(first, last))
        )
        if start is None or steps is None:
            raise UsageError(f"no step ended from second {first} to {last}, or none is still kept")
        parts = self._log.parts_between(start.t + (first - 1) * 10**9, start.t + (last + 1) * 10**9)
        if not parts:
            raise UsageError(f"{self._log.path}: the part with that time no longer exists")
        if self._folder is None:
            self._folder = self._files.enter_context(temporary_directory("instr-live-"))
        self._count += 1
        trace = self._folder / f"{first}-{last}-s.{self._count}.pftrace"
        words = ("to-perfetto", "--lenient", "--steps", f"{steps[0]}:{steps[1]}", "-o", str(trace))
        with subprocess.Popen(
            python(_CONVERT, *words, *map(str, parts)), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        ) as self._child:  # fmt: skip
            if self._closed:
                self._child.kill()
            _, errors = self._child.communicate()
        if self._child.returncode != 0:
            raise InstrError(f"the log was not converted: {errors.strip()[-500:]}")
        return trace
