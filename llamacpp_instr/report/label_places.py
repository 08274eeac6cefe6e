"""Where the name of a point can be written, and what each place costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias


def offsets(width: float, height: float) -> Iterator[tuple[float, float]]:
    """Possible offsets of a name's lower left corner from its point, nearest first."""
    for gap in (7, 18, 32, 50, 75):
        for right, up in ((1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            far = gap if right == 0 or up == 0 else 0.75 * gap
            dx = {1: far, 0: -width / 2, -1: -width - far}[right]
            dy = {1: far, 0: -height / 2, -1: -height - far}[up]
            yield dx, dy


Box: TypeAlias = "tuple[float, float, float, float]"


def cost(place: Box, taken: Sequence[Box], room: Sequence[float]) -> float:
    """Pixels of a place that overlap others or are outside."""
    cost = sum(_overlap(place, other) for other in taken)
    inside = _overlap(place, (room[0], room[1], room[2], room[3]))
    return cost + 2 * ((place[2] - place[0]) * (place[3] - place[1]) - inside)


def _overlap(a: Box, b: Box) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0
