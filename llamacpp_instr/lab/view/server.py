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
from llamacpp_instr.lab.view.tensors import Tensors
from llamacpp_instr.lab.view.tiles import MEASURES, Measure
from llamacpp_instr.report.serving import LoopbackServer, page_routes

FILES = {
    "weights.js": ("weights.js", "text/javascript"),
    "panes.js": ("panes.js", "text/javascript"),
    "colors.js": ("colors.js", "text/javascript"),
    "figures.js": ("figures.js", "text/javascript"),
    "weights.css": ("weights.css", "text/css"),
}
"""of a page that calls `mount` of weights.js; it also needs uPlot"""


def weight_routes(tensors: Tensors) -> list[BaseRoute]:
    """The files of the page's part, and what it asks. Numbers are little-endian float32, in rows;
    their shape is in the header `X-Shape`."""

    def numbers(request: Request) -> Response:
        at = request.path_params
        measure = _measure(request)
        if measure is None:
            return _missing()
        found = tensors.tile(
            at["tensor"], at["which"], measure, at["level"], at["row"], at["column"]
        )
        if found is None:
            return _missing()
        return Response(
            found.astype("<f4").tobytes(), media_type="application/octet-stream",
            headers={"X-Shape": f"{found.shape[0]},{found.shape[1]}"},
        )  # fmt: skip

    def vector(request: Request) -> Response:
        found = tensors.vector(request.path_params["tensor"], request.path_params["which"])
        if found is None:
            return _missing()
        values, step = found
        return Response(
            values.astype("<f4").tobytes(), media_type="application/octet-stream",
            headers={"X-Shape": f"{len(values)}", "X-Step": f"{step}"},
        )  # fmt: skip

    def limits(request: Request) -> Response:
        measure = _measure(request)
        at = request.path_params
        found = tensors.limits(at["tensor"], at["which"], measure) if measure else None
        return _missing() if found is None else JSONResponse(found)

    def details(request: Request) -> Response:
        found = tensors.details(request.path_params["tensor"])
        return _missing() if found is None else JSONResponse(found)

    def figures(request: Request) -> Response:
        begin = request.query_params.get("begin", "0")
        return JSONResponse(tensors.figures(int(begin) if begin.isdecimal() else 0))

    tile = "/{measure}/{tensor:int}/{which:int}/{level:int}/{row:int}/{column:int}"
    return [
        *page_routes("llamacpp_instr.lab.view", FILES),
        Route("/tensors", _answered(lambda _: JSONResponse(tensors.listing()))),
        Route("/figures", _answered(figures)),
        Route("/tensor/{tensor:int}", _answered(details)),
        Route("/limits/{measure}/{tensor:int}/{which:int}", _answered(limits)),
        Route("/vector/{tensor:int}/{which:int}", _answered(vector)),
        Route(f"/tile{tile}", _answered(numbers)),
    ]


def _answered(answer: Callable[[Request], Response]) -> Any:
    """In a thread, because it computes; an error of a file is one line."""

    async def answered(request: Request) -> Response:
        try:
            return await asyncio.to_thread(answer, request)
        except UsageError as error:
            return PlainTextResponse(str(error), 409)

    return answered


def _measure(request: Request) -> Measure | None:
    named = request.path_params["measure"]
    return next((measure for measure in MEASURES if measure == named), None)


def _missing() -> Response:
    return PlainTextResponse("there is no such tensor, matrix or tile", 404)


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
            *page_routes("llamacpp_instr.lab.view", PAGE),
            *page_routes("llamacpp_instr.converters.live", CHARTS),
            *weight_routes(self._tensors),
        ]
        self._tensors.start()
        try:
            self.serve(own, started)
        finally:
            self._tensors.stop()
