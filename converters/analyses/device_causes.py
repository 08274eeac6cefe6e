"""What made devices slow: findings about logs that have the kernels of devices.

Invariant: as in `findings`, a rule is silent unless its own figure in the log exceeds a limit that
it names. Time in which several devices run counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from llamacpp_instr.base.terminal import counted, first_names
from llamacpp_instr.log.devices import n_executed
from llamacpp_instr.log.memory import MemoryInUse
from llamacpp_instr.log.schema import Graph, Plan
from llamacpp_instr.log.spans import Covered
from llamacpp_instr.log.steps import KERNELS, Account
from llamacpp_instr.model.file import layer_of
from llamacpp_instr.recording.memory.breakdown import read_breakdown
from llamacpp_instr.report.report import shown

Cause: TypeAlias = "tuple[str, float, str] | None"
"""what happened, its share, and what to try; None below the limit"""

BETWEEN = 0.02
"""share of the time of the steps"""
IDLE, BUSY_CPU = 0.3, 0.2
"""shares of the time of the steps: no device runs, and thread 0 computes or submits"""
CALLER_WAITS = 0.7
"""share of the time of the steps"""
STILL_FIT, KEPT_FREE = 0.1, 1 << 30
"""share of the time of the steps; bytes of a device that stay free, as many as llama.cpp leaves
when it fits a model to devices on its own (`common_params::fit_params_target`)"""


def _busy(account: Account) -> Covered:
    """The time during which a device runs."""
    return Covered([(of.begin.ravel(), of.end.ravel()) for of in account.device_ops])


class _Between(NamedTuple):
    """What the CPU computed between two parts of a device."""

    kernels: int
    """ns"""
    copies: int
    """ns of copying and waiting before and after it, without what a device computed meanwhile"""
    ops: Counter[str]
    """ns by op"""


def cpu_between(account: Account) -> Cause:
    """Ops fell back to the CPU between parts of a device, so that their data was copied there and
    back (BETWEEN)."""
    if not account.device_ops:
        return None
    found = list(_between(account, _busy(account)))
    kernels, copies = sum(of.kernels for of in found), sum(of.copies for of in found)
    share = (kernels + copies) / max(int(account.total.sum()), 1)
    if share < BETWEEN:
        return None
    ops: Counter[str] = sum((of.ops for of in found), Counter())
    names, devices = [op for op, _ in ops.most_common()], ", ".join(account.devices)
    what = (
        f"{first_names(names)} ran on the CPU between parts of {devices}: {shown(kernels, 'ns')} in"
        f" kernels, {shown(copies, 'ns')} to copy their data and to start again."
    )
    advice = (
        "The device lacks these ops, or what they read is in the CPU's memory: keep the KV cache"
        " and all weights of a layer on one device."
    )
    return what, share, advice


def _between(account: Account, busy: Covered) -> Iterator[_Between]:
    """One for each group of computes and each split of the CPU between two of devices."""
    session = account.session
    graph_of = dict(session.computes.tuples("compute", "graph"))
    cpu = {
        compute: (of.plan, of.dur[row])
        for of in account.ops
        for row, compute in enumerate(of.compute.tolist())
    }
    for splits in session.splits:
        gaps = np.zeros_like(splits.dur) if splits.gap is None else splits.gap
        begins, numbers = splits.begin, splits.label.tolist()
        without = gaps - busy.within(begins - gaps, begins)
        for row, compute in enumerate(splits.compute.tolist()):
            if compute not in account.row or compute not in cpu:
                continue
            plan, dur = cpu[compute]
            graph = session.graphs[graph_of[compute]]
            for at in _places(graph, session.plans[plan], numbers):
                split = graph.splits[numbers[at]]
                nodes = session.kernels(plan).nodes
                inside = [i for i, of in enumerate(nodes) if split.start <= of[0] < split.end]
                ops: Counter[str] = Counter()
                for i in inside:
                    ops[session.kernels(plan).label[i]] += int(dur[i])
                copies = int(without[row, at] + without[row, at + 1])
                yield _Between(int(dur[inside].sum()), max(copies, 0), ops)


def _places(graph: Graph, plan: Plan, numbers: list[int]) -> list[int]:
    """Where thread 0 runs kernels of a split directly between two of devices."""
    own = n_executed(graph, plan)
    others = [not own[n] and graph.splits[n].backend != "CPU" for n in numbers]
    return [
        i for i in range(1, len(numbers) - 1) if own[numbers[i]] and others[i - 1] and others[i + 1]
    ]


def device_waits(account: Account) -> Cause:
    """Devices are idle while thread 0 computes or submits (IDLE, BUSY_CPU)."""
    whole = max(int(account.total.sum()), 1)
    if not account.device_ops:
        return None
    idle = 1 - _busy(account).ns / whole
    computes, submits = (int(account.parts[of].sum()) / whole for of in (KERNELS, "submission"))
    if idle < IDLE or max(computes, submits) < BUSY_CPU:
        return None
    does = f"computes for {100 * computes:.0f} %"
    advice = "Move more of the model to it (--gpu-layers), if its memory allows that."
    if submits > computes:
        does = f"submits for {100 * submits:.0f} %"
        advice = "Its kernels are too small to launch: give it larger batches or more sequences."
    names = " or ".join(account.devices)
    what = f"No kernel runs on {names} in this time: thread 0 {does} of the steps' time."
    return what, idle, advice


def caller_waits(account: Account) -> Cause:
    """Thread 0 waits for devices that compute (CALLER_WAITS)."""
    if not account.device_ops:
        return None
    busy, steps = _busy(account), account.steps
    waits = int(busy.within(steps["returned"], steps["end"]).sum())
    for splits in account.session.splits:
        if splits.gap is not None:
            mine = [compute in account.row for compute in splits.compute.tolist()]
            begins, gaps = splits.begin[mine], splits.gap[mine]
            waits += int(busy.within(begins - gaps, begins).sum())
    share = waits / max(int(account.total.sum()), 1)
    if share < CALLER_WAITS:
        return None
    what = f"Thread 0 waits for the kernels of {' and '.join(account.devices)}."
    return what, share, "`instr stats --by device,op` shows which of its ops take the time."


def layers_still_fit(account: Account) -> Cause:
    """The CPU computes layers for which devices have the memory, KEPT_FREE of it left free
    (STILL_FIT)."""
    session, in_use = account.session, MemoryInUse()
    for event in session.memory:
        in_use.take(event, session.contexts[event.ctx].model)
    ctx = Counter(account.steps["ctx"].tolist()).most_common(1)[0][0]
    latest = [event for event in session.memory if event.ctx == ctx]
    if not in_use.devices or not latest or not session.has_ops:
        return None
    context = session.contexts[ctx]
    tensors = session.tensors_of.get(context.model, [])
    known = read_breakdown(context, latest[-1].buffers, tensors)
    held = in_use.on_devices
    # some drivers report all of their memory as free
    rooms = {
        name: min(of.free, of.total - held[name]) - KEPT_FREE for name, of in in_use.devices.items()
    }
    more = int(known.gpu_layers == 0)  # the output comes first
    if more:
        rooms[max(rooms, key=rooms.__getitem__)] -= sum(
            of.n_bytes for of in known.placements if layer_of(of.name) < 0
        )
    found: list[int] = []
    for layer, n_bytes in sorted(known.layers_of_machine().items(), reverse=True):
        device = max(rooms, key=rooms.__getitem__)
        if rooms[device] < n_bytes:
            break
        rooms[device] -= n_bytes
        found.append(layer)
    spent = sum(
        ns for at, ns in account.by_place()[0].items() if not at.device and at.layer in found
    )
    share = spent / max(int(account.total.sum()), 1)
    if not found or share < STILL_FIT:
        return None
    what = (
        f"{counted(len(found), 'layer')} on the CPU would still fit into the memory of"
        f" {' and '.join(rooms)}."
    )
    return what, share, f"Load the model with --gpu-layers {known.gpu_layers + more + len(found)}."
