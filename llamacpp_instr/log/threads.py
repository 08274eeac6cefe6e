"""How long a thread of ggml worked in a compute, and how long it waited for the others.

Every thread has a part of a matrix product, but not of an op with a single row. So only products
show which threads are slow: those that the others wait for there.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

from llamacpp_instr.log.known import KnownPlan
from llamacpp_instr.log.schema import Ops


class ThreadTimes(NamedTuple):
    """ns of a thread in one compute, in all kernels and in matrix products. Waiting is time in
    barriers: inside kernels and before the next one."""

    busy: int
    waiting: int
    in_products: int
    after_products: int
    """waiting in them and for their end"""


def thread_times(event: Ops, plan: KnownPlan) -> ThreadTimes:
    """The times of a whole event (`resolve`) with the waits of its thread."""
    wait = event.wait or [0] * len(event.dur)
    gap = event.gap or [0] * len(event.dur)
    busy = sum(event.dur) - sum(wait)
    if plan not in _PRODUCTS:
        op = plan.graph.event.whole.op
        found = [i for i, node in enumerate(plan.event.node) if op[node].startswith("MUL_MAT")]
        _PRODUCTS[plan] = found
    products = _PRODUCTS[plan]
    inside = sum(map(wait.__getitem__, products))
    ends = [*gap[1:], event.tail]
    return ThreadTimes(
        busy,
        sum(wait) + sum(gap),
        sum(map(event.dur.__getitem__, products)) - inside,
        inside + sum(map(ends.__getitem__, products)),
    )


_PRODUCTS: WeakKeyDictionary[KnownPlan, list[int]] = WeakKeyDictionary()
"""which kernels of a plan are products"""
