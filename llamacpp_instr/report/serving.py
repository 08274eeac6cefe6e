"""Serves pages to a browser on this machine.

Invariant: it listens on the loopback interface, and answers only requests whose Host is that, and
whose Origin, if any, is the same. Pages that show a log or a model lie under a random name, because
other users of this machine can reach the port.
"""

from __future__ import annotations

import importlib.resources
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from llamacpp_instr.base.errors import UsageError

LOOPBACK = "127.0.0.1"
HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")
"""the Host of a browser on this machine, or behind `ssh -L`. Any other name is DNS rebinding"""
LONGEST_URL = 1000
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " frame-ancestors 'none'; base-uri 'none'"
)
MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
HEADERS = {
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class LoopbackServer:
    """Bound to a port of the loopback interface; 0 takes a free one. Its pages may load what
    `policy` allows, a Content-Security-Policy. Raises UsageError if the port is taken."""

    def __init__(self, port: int = 0, policy: str = POLICY) -> None:
        self._policy = policy
        self._stopped = False
        self._server: uvicorn.Server | None = None
        self._socket = socket.socket()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((LOOPBACK, port))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise UsageError(f"--port {port}: {error.strerror}") from None
        self.port: int = self._socket.getsockname()[1]
        self._secret = secrets.token_urlsafe(16)
        self.address = f"http://{LOOPBACK}:{self.port}/{self._secret}/"

    def serve(
        self,
        own: Sequence[BaseRoute],
        started: Callable[[], None],
        public: Sequence[BaseRoute] = (),
    ) -> None:
        """Serve until Ctrl-C or SIGTERM: `own` under the random name, `public` without it.
        `started` is called once it answers."""

        @asynccontextmanager
        async def lifespan(_app: Starlette) -> AsyncIterator[None]:
            started()
            yield

        routes = [Mount(f"/{self._secret}", routes=own), *public]
        app = _OwnOnly(Starlette(routes=routes, lifespan=lifespan), self._policy)
        config = uvicorn.Config(
            app, log_level="critical", lifespan="on", ws="auto",
            timeout_graceful_shutdown=1, ws_max_size=1 << 16, server_header=False,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._server.should_exit = self._stopped
        with suppress(KeyboardInterrupt), self._socket:
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `serve`, from another thread or a signal handler; also before it has begun."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True


def page_routes(package: str) -> list[Route]:
    """Routes of the files in the folder `page` of a package, and of those that all pages share:
    common.js and uPlot. `page.html` is at the root."""

    def route(name: str, data: bytes) -> Route:
        media_type = MEDIA_TYPES[name.rpartition(".")[2]]
        path = "/" if name == "page.html" else f"/{name}"
        return Route(path, lambda _request: Response(data, media_type=media_type))

    return [
        route(file.name, file.read_bytes())
        for folder in (package, __package__)
        for file in (importlib.resources.files(folder) / "page").iterdir()
        if file.name.rpartition(".")[2] in MEDIA_TYPES
    ]


class _OwnOnly:
    """Refuses requests from another page or to another name, and adds HEADERS."""

    def __init__(self, app: ASGIApp, policy: str) -> None:
        self._app = app
        headers = {"Content-Security-Policy": policy, **HEADERS}
        self._headers = [(k.lower().encode(), v.encode()) for k, v in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == b"host"]
        origins = [value for name, value in headers if name == b"origin"]
        own = len(hosts) == 1 and HOST.fullmatch(hosts[0])
        if not own or any(origin != f"http://{hosts[0]}" for origin in origins):
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 4403})
            else:
                await Response(status_code=421)(scope, receive, send)
            return
        if len(scope["raw_path"]) + len(scope["query_string"]) > LONGEST_URL:
            await Response(status_code=414)(scope, receive, send)
            return

        async def with_headers(message):  # type: ignore[no-untyped-def]
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        await self._app(scope, receive, with_headers)
