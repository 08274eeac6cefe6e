"""Measured kernels of recordings, with what their times depend on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.session import Session, Timed
from llamacpp_instr.prediction.features import Features, features

Floats = NDArray[np.float64]


QUIET = 0.25
"""the quantile of equal computes that counts: other processes only make them slower"""


TOGETHER = 32
"""consecutive positions whose decodes count as equal"""


@dataclass(frozen=True)
class Sample:
    """Equal computes of a recording."""

    threads: int
    tokens: int
    past: int
    features: Features
    ns: Floats
    """of each kernel, the barrier after it included"""
    step_ns: float
    """of the whole step"""
    steps: Floats
    """of each step, ns"""


def samples(session: Session, quantile: float = QUIET) -> list[Sample]:
    """The computes of a session at `detailed`, those with equal graphs and tokens together. The
    first of each is left out, because it builds the graph. `quantile` of them counts."""
    rows: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    computes, table = session.computes, session.steps
    numbers = table["step"].tolist()
    position = dict(zip(numbers, table["pos"].tolist(), strict=True))
    lasting = dict(zip(numbers, (table["end"] - table["begin"]).tolist(), strict=True))
    number = {compute: i for i, compute in enumerate(computes["compute"].tolist())}
    ops = [of for of in session.ops if of.thread == 0 and of.compute in number]
    for i, of in enumerate(ops):
        at = number[of.compute]
        past = position.get(int(computes["step"][at]), 0)
        threads, tokens = int(computes["n_threads"][at]), int(computes["n_tokens"][at])
        rows[of.plan, threads, tokens, past // TOGETHER].append(i)
    found = []
    for (plan, threads, tokens, _), of_key in rows.items():
        same = of_key[1:] or of_key
        times = np.array([_with_barriers(ops[i]) for i in same], np.float64)
        # the later one of a sequence takes longer, so that the quantile of times is that of pasts
        middle = ops[same[int(quantile * (len(same) - 1))]]
        at = number[middle.compute]
        graph = session.graphs[session.plans[plan].graph]
        of_plan = features(
            graph, session.plans[plan], session.ubatches.get(middle.compute), threads
        )
        steps = [lasting.get(int(computes["step"][number[ops[i].compute]]), 0) for i in same]
        found.append(
            Sample(
                threads,
                tokens,
                position.get(int(computes["step"][at]), 0),
                of_plan,
                np.quantile(times, quantile, axis=0, method="lower"),
                float(np.quantile(steps, quantile, method="lower")),
                np.array(steps, np.float64),
            )
        )
    return found


def _with_barriers(ops: Timed) -> NDArray[np.int64]:
    """The duration of each kernel, up to the beginning of the next one."""
    if ops.gap is None:
        return ops.dur
    after: NDArray[np.int64] = np.append(ops.gap[1:], 0)
    return ops.dur + after
