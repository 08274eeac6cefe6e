"""Serves the page of a model's weights; another page's server can mount its routes, too.

Invariant: everything lies under the random name of `serving`; requests only read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.view.tensors import Floats, Missing, Tensors
from llamacpp_instr.report.serving import LoopbackServer, page_routes

FILES = {
    name: (name, "text/css" if name.endswith(".css") else "text/javascript")
    for name in ("weights.js", "panes.js", "colors.js", "figures.js", "weights.css")
}
"""of a page that calls `mount` of weights.js; it also needs uPlot"""
PAGE = {"": ("page.html", "text/html"), "main.js": ("main.js", "text/javascript")}
CHARTS = {"uplot.js": ("uplot.js", "text/javascript"), "uplot.css": ("uplot.css", "text/css")}


def weight_routes(tensors: Tensors) -> list[BaseRoute]:
    """The files of the page's part, and what it asks. Numbers are little-endian float32, in rows;
    their shape is in the header `X-Shape`."""

    def tile(request: Request) -> Response:
        return _floats(tensors.tile(**request.path_params))

    def vector(request: Request) -> Response:
        values, step = tensors.vector(**request.path_params)
        return _floats(values, **{"X-Step": f"{step}"})

    def limits(request: Request) -> Response:
        return JSONResponse(tensors.limits(**request.path_params))

    def details(request: Request) -> Response:
        return JSONResponse(tensors.details(**request.path_params))

    def figures(request: Request) -> Response:
        begin = request.query_params.get("begin", "0")
        return JSONResponse(tensors.figures(int(begin) if begin.isdecimal() else 0))

    matrix, at = "{number:int}/{which:int}", "{level:int}/{row:int}/{column:int}"
    return [
        *page_routes("llamacpp_instr.lab.view", FILES),
        Route("/tensors", _answered(lambda _: JSONResponse(tensors.listing()))),
        Route("/figures", _answered(figures)),
        Route("/tensor/{number:int}", _answered(details)),
        Route("/limits/{measure}/" + matrix, _answered(limits)),
        Route("/vector/" + matrix, _answered(vector)),
        Route("/tile/{measure}/" + matrix + "/" + at, _answered(tile)),
    ]


def _answered(answer: Callable[[Request], Response]) -> Any:
    """In a thread, because it computes; an error of a file is one line."""

    async def answered(request: Request) -> Response:
        try:
            return await asyncio.to_thread(answer, request)
        except UsageError as error:
            return PlainTextResponse(str(error), 409)
        except Missing:
            return PlainTextResponse("there is no such tensor, matrix or tile", 404)

    return answered


def _floats(values: Floats, **headers: str) -> Response:
    shape = ",".join(map(str, values.shape))
    return Response(
        values.astype("<f4").tobytes(), media_type="application/octet-stream",
        headers={"X-Shape": shape, **headers},
    )  # fmt: skip


class WeightsServer(LoopbackServer):
    """A server of tensors. Raises UsageError if the port is taken."""

    def __init__(self, tensors: Tensors, port: int = 0) -> None:
        super().__init__(port)
        self._tensors = tensors

    def run(self, started: Callable[[], None]) -> None:
        """Serve until Ctrl-C or SIGTERM; `started` is called once it answers."""
        own = [
            *page_routes("llamacpp_instr.lab.view", PAGE),
            *page_routes("llamacpp_instr.converters.live", CHARTS),
            *weight_routes(self._tensors),
        ]
        self._tensors.start()
        try:
            self.serve(own, started)
        finally:
            self._tensors.stop()
