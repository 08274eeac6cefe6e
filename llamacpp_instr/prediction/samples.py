"""Measured kernels of recordings, with what their times depend on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.log.session import Session, Timings
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
    computes, table = session.computes, session.steps
    numbers = table["step"].tolist()
    position = dict(zip(numbers, table["pos"].tolist(), strict=True))
    lasting = dict(zip(numbers, (table["end"] - table["begin"]).tolist(), strict=True))
    number = {compute: i for i, compute in enumerate(computes["compute"].tolist())}
    found = []
    for ops in session.ops:
        if ops.thread:
            continue
        rows: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        at = [number.get(compute, -1) for compute in ops.compute.tolist()]
        for row, i in enumerate(at):
            if i >= 0:
                past = position.get(int(computes["step"][i]), 0)
                key = int(computes["n_threads"][i]), int(computes["n_tokens"][i]), past // TOGETHER
                rows[key].append(row)
        for (threads, tokens, _), of_key in rows.items():
            same = of_key[1:] or of_key
            # the later one of a sequence takes longer, so that the quantile of times is that of
            # pasts
            middle = same[int(quantile * (len(same) - 1))]
            plan = session.plans[ops.plan]
            ubatch = session.ubatches.get(int(ops.compute[middle]))
            steps = [lasting.get(int(computes["step"][at[row]]), 0) for row in same]
            found.append(
                Sample(
                    threads,
                    tokens,
                    position.get(int(computes["step"][at[middle]]), 0),
                    features(session.graphs[plan.graph], plan, ubatch, threads),
                    np.quantile(_with_barriers(ops, same), quantile, axis=0, method="lower"),
                    float(np.quantile(steps, quantile, method="lower")),
                    np.array(steps, np.float64),
                )
            )
    return found


def _with_barriers(ops: Timings, rows: list[int]) -> Floats:
    """The duration of each kernel, up to the beginning of the next one."""
    times = ops.dur[rows].astype(np.float64)
    if ops.gap is not None:
        times[:, :-1] += ops.gap[rows, 1:]
    return times
