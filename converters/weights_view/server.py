"""Serves the page of a model's weights.

Invariant: everything lies under the random name of `serving`; requests only read.
"""

from __future__ import annotations

from collections.abc import Callable

from converters.serving import LoopbackServer, page_routes
from converters.weights_view.routes import weight_routes
from converters.weights_view.tensors import Tensors

PAGE = {"": ("page.html", "text/html"), "main.js": ("main.js", "text/javascript")}
CHARTS = {"uplot.js": ("uplot.js", "text/javascript"), "uplot.css": ("uplot.css", "text/css")}


class WeightsServer(LoopbackServer):
    """A server of tensors. Raises UsageError if the port is taken."""

    def __init__(self, tensors: Tensors, port: int = 0) -> None:
        super().__init__(port)
        self._tensors = tensors

    def run(self, started: Callable[[], None]) -> None:
        """Serve until Ctrl-C or SIGTERM; `started` is called once it answers."""
        own = [
            *page_routes("converters.weights_view", PAGE),
            *page_routes("converters.live", CHARTS),
            *weight_routes(self._tensors),
        ]
        self._tensors.start()
        try:
            self.serve(own, started)
        finally:
            self._tensors.stop()
