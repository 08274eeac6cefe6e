"""What no schedule can beat: the longest path, the work, the bandwidth.

Invariant: every figure is a lower bound of the makespan of every valid schedule (`schedule`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.converters.scheduling.engines import Engines, check_usable
from llamacpp_instr.converters.scheduling.places import kinds_of
from llamacpp_instr.converters.scheduling.schedule import Costs, costs_of
from llamacpp_instr.converters.scheduling.tasks import Int64, Tasks

MOST_SETS = 64
"""sets of kinds of engine whose work is bounded"""


@dataclass(frozen=True)
class Bound:
    """One lower bound."""

    kind: Literal["path", "work", "bandwidth"]
    name: str
    """what binds, in words"""
    ns: int


@dataclass(frozen=True)
class Bounds:
    """The largest bound of each kind; those that need a bandwidth only if there is one."""

    bounds: list[Bound]
    """the largest first"""

    @property
    def binding(self) -> Bound:
        """The largest."""
        return self.bounds[0]

    @property
    def makespan(self) -> int:
        """ns: no schedule is shorter."""
        return self.bounds[0].ns


def compute_bounds(tasks: Tasks, engines: Engines) -> Bounds:
    """Lower bounds of the makespan. Raises UsageError for engines that do not fit the tasks.

    - path: the longest path, with each task on the engine where it is shortest, and a hand-over
      between two tasks that no kind of engine can both run;
    - work: for sets of kinds of engine, the time that the tasks that run only there need, if all
      these engines were busy all the time;
    - bandwidth: the same for the bytes that these engines move, and that DMA engines bring.
    """
    check_usable(tasks, engines)
    costs = costs_of(tasks, engines)
    of_label = kinds_of(tasks, engines)
    found = [_path(tasks, engines, costs, of_label)]
    mask_of_label = np.array([sum(1 << k for k in kinds) for kinds in of_label], np.int64)
    masks = mask_of_label[tasks.label]
    sets = _unions(sorted(set(masks.tolist())))
    for chosen in sets:
        inside = (masks & ~chosen) == 0
        found += _work(engines, costs, chosen, inside)
        found += _moved(tasks, engines, costs, chosen, inside)
    found += _brought(tasks, engines, costs, masks)
    best: dict[str, Bound] = {}
    for bound in sorted(found, key=lambda bound: -bound.ns):
        best.setdefault(bound.kind, bound)
    return Bounds(list(best.values()))


def _path(tasks: Tasks, engines: Engines, costs: Costs, of_label: list[tuple[int, ...]]) -> Bound:
    least = costs.least_transfer_ns()
    shortest = np.full(len(tasks), np.iinfo(np.int64).max)
    all_fed = tasks.load > 0
    for ns, fed, streamed in zip(costs.ns, costs.fed, costs.streamed, strict=True):
        own = np.where(streamed, np.maximum(ns, least), ns) if fed else ns
        shortest = np.where(ns > 0, np.minimum(shortest, own), shortest)
        all_fed &= (ns == 0) | (~streamed if fed else False)
    # what must be brought whole is there at the earliest when its transfer has ended
    earliest: list[int] = np.where(all_fed, least, 0).tolist()
    own_ns = shortest.tolist()
    # tasks that the same kinds can run; there are few such sets, and many labels
    number = {kinds: i for i, kinds in enumerate(dict.fromkeys(of_label))}
    group = np.array([number[kinds] for kinds in of_label], np.int64)[tasks.label].tolist()
    apart = [[not set(a) & set(b) for b in number] for a in number]
    handover = engines.handover_ns
    first, sources = tasks.first.tolist(), tasks.sources.tolist()
    end = [0] * len(tasks)
    for task in range(len(tasks)):
        begin, far = earliest[task], apart[group[task]]
        for source in sources[first[task] : first[task + 1]]:
            ended = end[source]
            if handover and far[group[source]]:
                ended += handover
            if ended > begin:
                begin = ended
        end[task] = begin + own_ns[task]
    return Bound("path", "the longest path", max(end, default=0))


def _unions(masks: list[int]) -> list[int]:
    """The sets, and those that are unions of them, the small ones first; at most MOST_SETS."""
    found = set(masks)
    todo = list(masks)
    while todo and len(found) < MOST_SETS:
        one = todo.pop()
        new = {one | other for other in masks} - found
        found |= new
        todo += new
    return sorted(found, key=lambda mask: (mask.bit_count(), mask))


def _work(engines: Engines, costs: Costs, chosen: int, inside: NDArray[np.bool_]) -> list[Bound]:
    """A feasible solution of the dual of the linear program that spreads the tasks over the
    engines: with weights y of the kinds for which the sum of count * y is 1, the sum over tasks of
    the least y * ns is a lower bound. The weights are the kinds' mean speeds: exact if each kind is
    as much faster for all tasks; else still a bound."""
    kinds = [k for k in range(len(engines.kinds)) if chosen >> k & 1]
    shortest: Int64 | None = None
    for k in kinds:
        ns = np.where(costs.ns[k] > 0, costs.ns[k], np.iinfo(np.int64).max)
        shortest = ns if shortest is None else np.minimum(shortest, ns)
    assert shortest is not None
    weights = []
    for k in kinds:
        able = inside & (costs.ns[k] > 0)
        own = int(costs.ns[k][able].sum())
        weights.append(int(shortest[able].sum()) / own if own else 1.0)
    name = "the work of " + _names(engines, kinds)
    if len(set(weights)) == 1 and all(
        bool(((costs.ns[k] == shortest) | (costs.ns[k] == 0) | ~inside).all()) for k in kinds
    ):
        count = sum(engines.kinds[k].count for k in kinds)
        return [Bound("work", name, -(-int(shortest[inside].sum()) // count))]
    total = sum(engines.kinds[k].count * y for k, y in zip(kinds, weights, strict=True))
    least = np.full(len(inside), np.inf)
    for k, y in zip(kinds, weights, strict=True):
        least = np.where(costs.ns[k] > 0, np.minimum(least, y * costs.ns[k]), least)
    return [Bound("work", name, _floor(float(least[inside].sum()) / total))]


def _moved(
    tasks: Tasks, engines: Engines, costs: Costs, chosen: int, inside: NDArray[np.bool_]
) -> list[Bound]:
    kinds = [k for k in range(len(engines.kinds)) if chosen >> k & 1]
    total = 0.0
    for k in kinds:
        bandwidth = engines.kinds[k].bandwidth
        if bandwidth is None:
            return []
        total += engines.kinds[k].count * bandwidth
    brought = any(costs.fed[k] for k in kinds)
    moved = int((tasks.bytes - tasks.load if brought else tasks.bytes)[inside].sum())
    name = "the bandwidth of " + _names(engines, kinds)
    return [Bound("bandwidth", name, _floor(moved * 1e9 / total))]


def _brought(tasks: Tasks, engines: Engines, costs: Costs, masks: Int64) -> list[Bound]:
    """The loads of the tasks that only engines with local memory can run."""
    bring = [k for k, ns in enumerate(costs.transfer_ns) if ns.any()]
    if not bring:
        return []
    fed = sum(1 << k for k, is_fed in enumerate(costs.fed) if is_fed)
    load = int(tasks.load[(masks & ~fed) == 0].sum())
    total = sum(engines.kinds[k].count * (engines.kinds[k].bandwidth or 0.0) for k in bring)
    name = "loads, by the bandwidth of " + _names(engines, bring)
    return [Bound("bandwidth", name, _floor(load * 1e9 / total))]


def _names(engines: Engines, kinds: list[int]) -> str:
    if len(kinds) == len(engines.kinds):
        return "all engines"
    return " and ".join(engines.kinds[k].name for k in kinds) + " engines"


def _floor(ns: float) -> int:
    """Rounded down, by more than floating-point sums can be wrong."""
    return max(math.floor(ns * (1 - 1e-11)), 0)
