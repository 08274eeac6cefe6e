"""Serves the page of a live session, its frames over a WebSocket, and its metrics.

Invariant: it listens on the loopback interface, and answers only requests whose Host is that, and
whose Origin, if any, is its own. What shows text of the session lies under a random name, because
other users of this machine can reach the port. It never writes, and nothing that it gets is run.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from converters.live.frames import step_details
from converters.live.hub import FRAME_S, Hub
from converters.live.metrics import CONTENT_TYPE, metrics_text
from llamacpp_instr.errors import UsageError

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")
PAGE = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "draw.js": ("draw.js", "text/javascript"),
    "uplot.js": ("uplot.js", "text/javascript"),
    "uplot.css": ("uplot.css", "text/css"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
    " connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class LiveServer:
    """A server of `hub`, bound to a port of the loopback interface; 0 takes a free one.

    Raises UsageError if the port is taken.
    """

    def __init__(self, hub: Hub, port: int = 0) -> None:
        self._hub = hub
        self._socket = socket.socket()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((LOOPBACK, port))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise UsageError(f"--port {port}: {error.strerror}") from None
        self.port: int = self._socket.getsockname()[1]
        self._name = secrets.token_urlsafe(16)
        self.address = f"http://{LOOPBACK}:{self.port}/{self._name}/"
        self.metrics = f"http://{LOOPBACK}:{self.port}/metrics"

    def run(self, started: Callable[[], None]) -> None:
        """Serve until Ctrl-C or SIGTERM; `started` is called once it answers."""
        config = uvicorn.Config(
            self._app(started), log_level="critical", lifespan="on", ws="auto",
            timeout_graceful_shutdown=1, ws_max_size=1 << 16, server_header=False,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        with suppress(KeyboardInterrupt), self._socket:
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `run`, from another thread."""
        self._server.should_exit = True

    def _app(self, started: Callable[[], None]) -> ASGIApp:
        files = importlib.resources.files("converters.live") / "page"
        shown = [
            Route(f"/{path}", _file((files / name).read_bytes(), media_type))
            for path, (name, media_type) in PAGE.items()
        ]
        own = [
            *shown,
            WebSocketRoute("/frames", self._frames),
            Route("/step/{step:int}", self._step),
        ]
        routes = [Mount(f"/{self._name}", routes=own), Route("/metrics", self._metrics)]

        @asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            started()
            yield

        return _OwnOnly(Starlette(routes=routes, lifespan=lifespan), self.port)

    async def _frames(self, viewer: WebSocket) -> None:
        """Every frame from the one after `?after=`, or from a key frame on."""
        after = viewer.query_params.get("after", "-1")
        n = int(after) if after.isdecimal() and len(after) < 19 else -1
        await viewer.accept()
        gone = asyncio.create_task(_until_gone(viewer))
        with suppress(WebSocketDisconnect, RuntimeError):
            while not gone.done():
                frame = await asyncio.to_thread(self._hub.frame_after, n)
                if frame is not None:
                    n, data = frame
                    await viewer.send_text(data.decode())
                elif self._hub.is_over:
                    await viewer.close()
                    break
                else:
                    await asyncio.sleep(FRAME_S / 2)
        gone.cancel()

    async def _step(self, request: Request) -> Response:
        step = request.path_params["step"]
        found = await asyncio.to_thread(self._hub.look, lambda state: step_details(state, step))
        if found is None:
            return PlainTextResponse(f"step {step} is not kept any more", 404)
        return JSONResponse(found)

    async def _metrics(self, _request: Request) -> Response:
        text = await asyncio.to_thread(self._hub.look, metrics_text)
        return Response(text, media_type=CONTENT_TYPE)


class _OwnOnly:
    """Refuses requests that another page or another name led here, and adds HEADERS."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._hosts = {f"{host}:{port}" for host in HOSTS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == b"host"]
        origins = [value for name, value in headers if name == b"origin"]
        own = len(hosts) == 1 and hosts[0] in self._hosts
        if not own or any(urlsplit(origin).netloc not in self._hosts for origin in origins):
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 4403})
            else:
                await Response(status_code=421)(scope, receive, send)
            return

        async def with_headers(message):  # type: ignore[no-untyped-def]
            if message["type"] == "http.response.start":
                added = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await self._app(scope, receive, with_headers)


def _file(data: bytes, media_type: str) -> Callable[[Request], Response]:
    return lambda _request: Response(data, media_type=media_type)


async def _until_gone(viewer: WebSocket) -> None:
    """A viewer sends nothing; reading notices that it has left."""
    while (await viewer.receive())["type"] != "websocket.disconnect":
        pass
