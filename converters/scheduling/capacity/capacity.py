"""What a recorded server can do for more clients, and with other settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import OnProgress, counted
from llamacpp_instr.converters.scheduling.capacity.server import (
    Outcome,
    Settings,
    settings_of,
    simulate,
)
from llamacpp_instr.converters.scheduling.capacity.step_times import Predict, StepTimes, fit
from llamacpp_instr.converters.scheduling.capacity.workload import (
    Workload,
    at_rate,
    closed_loop,
    recorded_workload,
    scaled,
)
from llamacpp_instr.log.requests import Request, find_requests, server_context
from llamacpp_instr.log.session import Session
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.report.report import shown

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Recorded:
    """A server as its log describes it."""

    settings: Settings
    times: StepTimes
    workload: Workload
    requests: list[Request]
    """those of the workload"""
    memory: int
    """bytes of the machine, 0 if unknown"""
    other_bytes: int
    """of the model and of compute buffers"""
    notes: list[str] = field(default_factory=list)
    """about the log: that it was not closed, and what was skipped"""


def recorded_server(session: Session, predict: Predict | None = None) -> Recorded:
    """What a simulation needs from a log. Raises UsageError if it has too few requests."""
    steps, requests = find_requests(session)
    times = fit(session, steps, requests, predict)
    kept = sorted((of for of in requests if of.token_times), key=lambda of: of.first)
    context = server_context(session.contexts.values())
    memory = [of for of in session.memory if context and of.ctx == context.ctx]
    other = sum(use.model + use.compute for use in memory[-1].buffers) if memory else 0
    there = session.start.host.memory or 0
    workload = recorded_workload(requests)
    if times.drafts:
        workload.joined = []  # drafts are drawn at random, so steps have other numbers
    settings = replace(settings_of(session), drafts=bool(times.drafts))
    notes = session.log_end.notes()
    return Recorded(settings, times, workload, kept, there, other, notes)


@dataclass(frozen=True)
class Point:
    """One load on one server; times in ns."""

    load: float
    """clients, or requests per second"""
    settings: Settings
    outcome: Outcome
    tokens_per_s: float
    requests_per_s: float
    first: tuple[float, float, float]
    """from the arrival to the first token, at p50, p95 and p99"""
    each: tuple[float, float, float]
    """between the tokens of a request"""
    queue: tuple[float, float, float]
    slots_busy: float
    """share of the time of all slots"""
    server_busy: float
    """share of the time"""
    unmeasured: float
    """share of the time in steps unlike any recorded one"""
    waits: bool = True
    """whether clients wait for their answers"""


SETTLED = 0.1
"""share of the requests at the beginning, and at the end, that the figures leave out"""


def measure(load: float, settings: Settings, outcome: Outcome) -> Point:
    """The figures of the requests between the first and the last."""
    kept = outcome.output > 0
    order = np.argsort(outcome.arrival[kept], kind="stable")
    arrival, begin, first, end, output = (
        getattr(outcome, name)[kept][order]
        for name in ("arrival", "begin", "first", "end", "output")
    )
    cut = int(SETTLED * len(arrival))
    middle = slice(cut, len(arrival) - cut)
    took = max(float(end.max() - arrival.min()), 1.0) if len(end) else 1.0
    several = output > 1
    each = (end - first)[several] / (output[several] - 1)
    steps = outcome.prompt_ns + outcome.decode_ns
    return Point(
        load, settings, outcome,
        float(output.sum()) / took * 1e9, len(output) / took * 1e9,
        _percentiles((first - arrival)[middle]), _percentiles(each),
        _percentiles((begin - arrival)[middle]),
        outcome.slot_ns / took / settings.slots, (steps + outcome.between_ns) / took,
        outcome.unmeasured_ns / max(steps, 1.0),
    )  # fmt: skip


def _percentiles(values: Int64) -> tuple[float, float, float]:
    found = np.percentile(values, [50, 95, 99]) if len(values) else np.full(3, np.nan)
    return float(found[0]), float(found[1]), float(found[2])


LEAST = 400
"""requests that are simulated for one point"""
ROUNDS = 10
"""the minimum of requests per client, on average"""


@dataclass(frozen=True)
class Load:
    """What clients ask a server for: requests like those of a workload."""

    workload: Workload
    by: Literal["clients", "arrivals/s"] = "clients"
    seed: int = 0

    def text(self, amount: float) -> str:
        """`1 client`, `2 clients`, `0.5 arrivals/s`."""
        return f"{amount:g} {'client' if (amount, self.by) == (1, 'clients') else self.by}"

    def of(self, amount: float) -> Workload:
        """The requests of `amount` clients that wait for their answers, or `amount` per second."""
        if self.by == "clients":
            n = max(LEAST, ROUNDS * round(amount))
            return closed_loop(self.workload, round(amount), n, self.seed)
        return at_rate(self.workload, amount, LEAST, self.seed)


class Capacity:
    """Simulates a recorded server under other loads and settings, each once; if `elsewhere`, on the
    machine that `predict` is for. `why` says why nothing is predicted."""

    def __init__(
        self, of: Recorded, load: Load, predict: Predict | None = None, elsewhere: bool = False,
        why: str = "",
    ) -> None:  # fmt: skip
        self.recorded, self.load = of, load
        self._predict = predict
        self.predicts, self.why = predict is not None, why
        self._times: dict[tuple[str, str], StepTimes] = {}
        self._points: dict[tuple[float, Settings], Point] = {}
        if not elsewhere:
            self._times[of.settings.type_k, of.settings.type_v] = of.times

    def times(self, settings: Settings) -> StepTimes:
        """The step times of a server with these settings."""
        key = settings.type_k, settings.type_v
        if key not in self._times:
            most = self.recorded.settings.ubatch
            self._times[key] = self.recorded.times.predicted(self._predict, *key, most)
        return self._times[key]

    def point(self, amount: float, settings: Settings) -> Point:
        """What the server does under this load."""
        key = amount, settings
        if key not in self._points:
            load, times = self.load.of(amount), self.times(settings)
            outcome = simulate(load, settings, times, self.load.seed)
            point = measure(amount, settings, outcome)
            self._points[key] = replace(point, waits=self.load.by == "clients")
        return self._points[key]

    def cache_bytes(self, settings: Settings) -> int:
        """The size of the cache of a server with these settings."""
        own = self.recorded.settings
        ratio = _bits(settings) / _bits(own)
        return round(self.recorded.times.bytes_of_token * ratio * settings.ctx)

    def check(self, settings: Settings) -> None:
        """Raise UsageError for settings that no server of this machine can have."""
        if settings.slot_ctx < 2 or settings.slots < 1 or settings.ubatch > settings.batch:
            raise UsageError(
                f"{settings.slots} slots of {settings.slot_ctx:,} cells, batches of"
                f" {settings.batch:,} with ubatches of {settings.ubatch:,}: no server can have that"
            )
        needed = self.cache_bytes(settings) + self.recorded.other_bytes
        there = self.recorded.memory
        if there and needed > there:
            raise UsageError(
                f"a context of {settings.ctx:,} tokens needs {shown(needed, 'bytes')} with the"
                f" model, but this machine has {shown(there, 'bytes')}; give a smaller --ctx or"
                " another --cache-type-k and --cache-type-v"
            )
        longest = max(of.prompt for of in self.load.workload.requests)
        if longest >= settings.slot_ctx:
            raise UsageError(
                f"{settings.slots} slots have {settings.slot_ctx:,} cells each, but a prompt has"
                f" {longest:,} tokens; give fewer --slots or a larger --ctx"
            )


def _bits(settings: Settings) -> float:
    return sum(
        BY_NAME[of.upper()].row_bytes(CELL_VALUES) for of in (settings.type_k, settings.type_v)
    )


CELL_VALUES = 256
"""a length of rows that each type can have"""
MOST_CLIENTS = 1024
KNEE = 0.95
"""share of the maximum tokens/s that is enough; and of the requests that arrive"""


def knee(points: Sequence[Point]) -> Point:
    """The smallest load with about the most tokens per second; with more, requests only wait. For
    requests that arrive at a rate, the largest rate that is served as it comes."""
    if points[0].waits:
        most = max(of.tokens_per_s for of in points)
        return next(of for of in points if of.tokens_per_s >= KNEE * most)
    served = [of for of in points if of.requests_per_s >= KNEE * of.load]
    return max(served or points[:1], key=lambda of: of.load)


def loads(first: float, last: float, whole: bool) -> list[float]:
    """From the first to the last, each twice the previous one."""
    found, now = [], first
    while now < last:
        found.append(now)
        now *= 2
    return [*found, float(round(last) if whole else last)]


# --- a goal ---


@dataclass(frozen=True)
class Wish:
    """One part of a goal: a figure of requests at a percentile, and its limit."""

    text: str
    figure: Literal["first", "each", "queue"]
    place: int
    """index of the percentile in PERCENTILES"""
    most: float
    """ns"""

    def of(self, point: Point) -> float:
        """The figure, ns; infinite if no request has it."""
        found = (point.first, point.each, point.queue)[
            ("first", "each", "queue").index(self.figure)
        ]
        return found[self.place] if found[self.place] == found[self.place] else float("inf")

    def shown(self, ns: float) -> str:
        """The figure in the unit of the goal."""
        return f"{1e9 / ns:.3g} tokens/s" if self.figure == "each" else shown(ns, "ns")


PERCENTILES = (50, 95, 99)
_WAIT = re.compile(r"(first token|queue)(?: p(50|95|99))? *<=? *(\d+(?:\.\d+)?) *(ms|s)")
_RATE = re.compile(r"(\d+(?:\.\d+)?) *tokens/s(?: p(50|95|99))?")


def parse_goal(text: str) -> list[Wish]:
    """The parts of `first token p95 < 2 s, 8 tokens/s`; without a percentile it is p95. Raises
    UsageError for a part that is not one of these."""
    found = []
    for part in (of.strip() for of in text.split(",")):
        if match := _WAIT.fullmatch(part):
            ns = float(match[3]) * (1e9 if match[4] == "s" else 1e6)
            figure: Literal["first", "queue"] = "queue" if match[1] == "queue" else "first"
            found.append(Wish(part, figure, PERCENTILES.index(int(match[2] or 95)), ns))
        elif (match := _RATE.fullmatch(part)) and float(match[1]):
            place = PERCENTILES.index(int(match[2] or 95))
            found.append(Wish(part, "each", place, 1e9 / float(match[1])))
        else:
            raise UsageError(
                f"--goal {part!r}: write it like 'first token p95 < 2 s, 8 tokens/s' or 'queue <"
                " 500 ms'; the percentiles are p50, p95 (the default) and p99"
            )
    return found


def reach(
    capacity: Capacity, wishes: Sequence[Wish], settings: Sequence[Settings], most: float,
    on_progress: OnProgress,
) -> Point:  # fmt: skip
    """The largest load up to `most` that fulfils all wishes, with the settings that allow it.
    Raises UsageError, which names the nearest load, if none does."""
    best: Point | None = None
    nearest: tuple[float, Point] | None = None
    whole = capacity.load.by == "clients"
    for done, of in enumerate(settings):
        on_progress(done, len(settings))
        low, high = 0.0, 1.0 if whole else most / 64
        while low < most:
            point = capacity.point(min(high, most), of)
            misses = max(wish.of(point) / wish.most for wish in wishes)
            if misses > 1:
                if nearest is None or misses < nearest[0]:
                    nearest = misses, point
                break
            best = point if best is None or point.load > best.load else best
            low, high = point.load, 2 * high
        high = min(high, most)
        for _ in range(MOST_CLIENTS.bit_length()):
            middle = (low + high) // 2 if whole else (low + high) / 2
            if not low < middle < high:
                break
            point = capacity.point(middle, of)
            if max(wish.of(point) / wish.most for wish in wishes) <= 1:
                low = middle
                best = point if best is None or point.load > best.load else best
            else:
                high = middle
    if best is None:
        assert nearest is not None
        missed = max(wishes, key=lambda wish: wish.of(nearest[1]) / wish.most)
        value = missed.shown(missed.of(nearest[1]))
        raise UsageError(
            f"--goal: nothing reaches {missed.text!r}; the nearest is {value} with"
            f" {capacity.load.text(nearest[1].load)} and"
            f" {counted(nearest[1].settings.slots, 'slot')}"
        )
    return best


def other_slots(capacity: Capacity, settings: Settings) -> list[Settings]:
    """The same settings with 1, 2, 4, … slots of the same size, as far as memory allows."""
    found = []
    for n in sorted({settings.slots, 1, 2, 4, 8, 16}):
        other = replace(settings, slots=n, ctx=n * settings.slot_ctx)
        if settings.unified:
            other = replace(settings, slots=n)
        with suppress(UsageError):
            capacity.check(other)
            found.append(other)
    return found


# --- what would help ---


def changes(capacity: Capacity, at: Point) -> list[tuple[str, Point]]:
    """The same load with one thing changed; the most requests per second first."""
    own, found = at.settings, list[tuple[str, Point]]()
    tried = [("twice the slots", replace(own, slots=2 * own.slots, ctx=2 * own.ctx))]
    if own.slots > 1:
        tried.append(("half the slots", replace(own, slots=own.slots // 2)))
    if own.type_k != "q8_0" and capacity.predicts:
        tried.append(("a cache of q8_0", replace(own, type_k="q8_0", type_v="q8_0")))
    for what, settings in tried:
        found.append((what, capacity.point(at.load, settings)))
    for what, prompt, answer in (("half the prompt", 0.5, 1.0), ("half the answer", 1.0, 0.5)):
        load = replace(capacity.load, workload=scaled(capacity.load.workload, prompt, answer))
        other = Capacity(capacity.recorded, load)
        other._times = capacity._times
        found.append((what, other.point(at.load, own)))
    return sorted(found, key=lambda of: (-round(of[1].requests_per_s, 2), of[1].first[1]))
