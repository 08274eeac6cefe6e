"""Charts as matplotlib's figures, whose axes and lines a test can read."""

from __future__ import annotations

from typing import Any

from llamacpp_instr.report import charts


def drawn(chart: charts.Chart) -> Any:
    """The figure of a chart, laid out."""
    with charts._figure("black") as figure:
        chart.draw(figure)
        figure.canvas.draw()
    return figure
