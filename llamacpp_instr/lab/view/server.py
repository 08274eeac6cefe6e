"""Serves the page of a model's weights; another page's server can mount its routes, too.

Invariant: everything lies under the random name of `serving`; requests only read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.view.tensors import MEASURES, Floats, Measure, Missing, Tensors
from llamacpp_instr.report.serving import LoopbackServer, page_routes

FILES = {
    "weights.js": ("weights.js", "text/javascript"),
    "panes.js": ("panes.js", "text/javascript"),
    "colors.js": ("colors.js", "text/javascript"),
    "figures.js": ("figures.js", "text/javascript"),
    "weights.css": ("weights.css", "text/css"),
}
"""of a page that calls `mount` of weights.js; it also needs uPlot"""


PAGE = {"": ("page.html", "text/html"), "main.js": ("main.js", "text/javascript")}
CHARTS = {"uplot.js": ("uplot.js", "text/javascript"), "uplot.css": ("uplot.css", "text/css")}


def weight_routes(tensors: Tensors) -> list[BaseRoute]:
    """The files of the page's part, and what it asks. Numbers are little-endian float32, in rows;
    their shape is in the header `X-Shape`."""

    def tile(request: Request) -> Response:
        at = request.path_params
        return _floats(
            tensors.tile(
                at["tensor"], at["which"], _measure(at), at["level"], at["row"], at["column"]
            )
        )

    def vector(request: Request) -> Response:
        values, step = tensors.vector(request.path_params["tensor"], request.path_params["which"])
        return _floats(values, **{"X-Step": f"{step}"})

    def limits(request: Request) -> Response:
        at = request.path_params
        return JSONResponse(tensors.limits(at["tensor"], at["which"], _measure(at)))

    def details(request: Request) -> Response:
        return JSONResponse(tensors.details(request.path_params["tensor"]))

    def figures(request: Request) -> Response:
        begin = request.query_params.get("begin", "0")
        return JSONResponse(tensors.figures(int(begin) if begin.isdecimal() else 0))

    place = "{measure}/{tensor:int}/{which:int}/{level:int}/{row:int}/{column:int}"
    return [
        *page_routes("llamacpp_instr.lab.view", FILES),
        Route("/tensors", _answered(lambda _: JSONResponse(tensors.listing()))),
        Route("/figures", _answered(figures)),
        Route("/tensor/{tensor:int}", _answered(details)),
        Route("/limits/{measure}/{tensor:int}/{which:int}", _answered(limits)),
        Route("/vector/{tensor:int}/{which:int}", _answered(vector)),
        Route(f"/tile/{place}", _answered(tile)),
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


def _measure(at: Mapping[str, Any]) -> Measure:
    for measure in MEASURES:
        if measure == at["measure"]:
            return measure
    raise Missing


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
