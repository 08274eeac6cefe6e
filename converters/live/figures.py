"""The figures that one looks at first. The page, the terminal and Prometheus show the same ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from llamacpp_instr.converters.live.lanes import Lane
from llamacpp_instr.converters.live.state import SECOND, LiveState, Second

RECENT = 100
"""how many of the latest requests the medians cover"""
IDLE = SECOND
"""after which a request that gets no token may be over: the application need not say so"""
IDLE_TOKENS = 20
"""the same as a multiple of its time between tokens, if that is longer"""


@dataclass(frozen=True)
class Figures:
    """Times in ns; None where there is nothing yet."""

    rate: int
    """tokens sampled in the last whole second"""
    to_first: float | None
    """median from a request's arrival to its first token"""
    between: float | None
    """median over requests of the mean time from a token to the next"""
    active: list[int]
    """the lanes of the requests under way"""
    cells: tuple[int, int] | None
    """of all caches: used, and all"""
    rss: int
    """bytes that the process has in memory, 0 if unknown"""
    working: float | None
    """share of the time of the latest compute's threads in which they worked"""
    computing: tuple[str, int, int] | None
    """the step under way that began first: its phase, its tokens, and how long it has taken"""


def figures_of(state: LiveState) -> Figures:
    """The figures as of now."""
    lanes = list(state.lanes)
    recent = lanes[-RECENT:]
    first = [t for lane in recent if (t := lane.request.to_first_token) is not None]
    between = [mean for lane in recent if (mean := lane.between) is not None]
    sizes = [(cache.used, cache.size) for cache in state.caches.values()]
    threads = list(state.threads.values())[-1:]
    work = sum(sum(of.working) for of in threads)
    wait = sum(sum(of.waiting) for of in threads)
    step = min(state.under_way, key=lambda step: step.event.t, default=None)
    took = max(state.now - step.event.t, 0) if step else 0
    return Figures(
        rate=_rate(state.seconds, state.elapsed // SECOND - 1),
        to_first=median(first) if first else None,
        between=median(between) if between else None,
        active=[lane.number for lane in lanes if is_active(lane, state.now)],
        cells=(sum(used for used, _ in sizes), sum(all_ for _, all_ in sizes)) if sizes else None,
        rss=state.rss,
        working=work / (work + wait) if work else None,
        computing=(step.phase, step.event.n_tokens, took) if step else None,
    )


def is_active(lane: Lane, now: int) -> bool:
    """Whether a request is under way, as far as the log shows."""
    return not lane.over and now - lane.request.end < _patience(lane)


def ended(state: LiveState) -> Iterator[Lane]:
    """The requests that have ended, as far as the log shows: also all if nothing is computed."""
    latest = max((lane.request.end for lane in state.lanes), default=0)
    quiet = 0 if state.under_way else state.now - latest
    return (lane for lane in state.lanes if lane.over or quiet >= _patience(lane))


def _patience(lane: Lane) -> float:
    return max(IDLE, IDLE_TOKENS * (lane.between or 0))


def _rate(seconds: deque[Second], number: int) -> int:
    for second in reversed(seconds):
        if second.number <= number:
            return second.tokens if second.number == number else 0
    return 0
