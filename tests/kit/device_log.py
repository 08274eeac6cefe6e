"""Made logs of sessions in which several backends share a graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from msgspec.structs import replace

from llamacpp_instr.log import schema as s

CALLERS = ("CPU", "BLAS")
"""backends whose kernels the caller runs"""
DEVICES = ("Vulkan0", "CUDA0")


def with_devices(
    events: Sequence[s.Event], random: Random, timed: bool = True, some_late: bool = True
) -> list[s.Event]:
    """The log as it would be with each graph in random parts: on the CPU, on BLAS, and on devices
    that run them behind the caller. Unless `timed`, the log has no kernels of devices. Otherwise
    each device has two queues: what they run may overlap. Lines of devices may come late."""
    plans = {event.graph: event for event in events if isinstance(event, s.Plan)}
    made = _Made(random, timed, max((plan.plan for plan in plans.values()), default=-1) + 1)
    found: list[s.Event] = []
    late: list[s.Event] = []
    for event in events:
        if not (isinstance(event, s.Layers) and made.parts):
            found += made.of(event, plans)
        late += made.lines
        made.lines.clear()
        n = random.randint(0, len(late)) if some_late else len(late)
        if isinstance(event, s.SessionEnd):
            found[-1:-1] = late
        else:
            found += late[:n]
            late = late[n:]
    return found


class _Made:
    def __init__(self, random: Random, timed: bool, next_plan: int) -> None:
        self.random, self.timed, self.next_plan = random, timed, next_plan
        self.parts: dict[int, list[s.Split]] = {}
        """of each graph with nodes"""
        self.own: dict[int, list[int]] = {}
        """of each plan: the kernels that the caller runs"""
        self.plans: dict[int, list[tuple[int, str, int, int]]] = defaultdict(list)
        """of each plan: split, device, plan and number of kernels of the others"""
        self.graphs: dict[int, int] = {}
        """of each plan: its graph"""
        self.described: set[str] = set()
        self.lines: list[s.Event] = []

    def of(self, event: s.Event, plans: dict[int, s.Plan]) -> Iterator[s.Event]:
        """What the log has in place of an event; `lines` are those of devices."""
        if isinstance(event, s.Graph) and event.graph in plans:
            starts = plans[event.graph].node[1:]
            cuts = sorted(self.random.sample(starts, self.random.randint(1, 4)))
            bounds = zip([0, *cuts], [*cuts, event.n_nodes], strict=True)
            backends = self.random.choices((*CALLERS, *DEVICES), k=len(cuts) + 1)
            splits = [
                s.Split(start=begin, end=end, backend=backend)
                for (begin, end), backend in zip(bounds, backends, strict=True)
            ]
            self.parts[event.graph] = splits
            yield replace(event, splits=splits)
        elif isinstance(event, s.Plan):
            yield from self._of_plan(event)
        elif isinstance(event, s.Ops) and event.plan in self.own:
            yield from self._of_ops(event)
        else:
            yield event

    def _of_plan(self, plan: s.Plan) -> Iterator[s.Plan]:
        kernels = list(zip(plan.node, plan.counts, strict=True))
        inside = {
            i: [k for k, (node, _) in enumerate(kernels) if split.start <= node < split.end]
            for i, split in enumerate(self.parts[plan.graph])
        }
        backends = [split.backend for split in self.parts[plan.graph]]
        own = [k for i, of in inside.items() if backends[i] in CALLERS for k in of]
        self.own[plan.plan], self.graphs[plan.plan] = own, plan.graph
        yield _some(plan, own)
        for i, of in inside.items():
            if backends[i] not in CALLERS and self.timed:
                yield replace(_some(plan, of), plan=self.next_plan)
                self.plans[plan.plan].append((i, backends[i], self.next_plan, len(of)))
                self.next_plan += 1

    def _of_ops(self, ops: s.Ops) -> Iterator[s.Event]:
        own, random = self.own[ops.plan], self.random
        columns: dict[str, Any] = {}
        for name in ("gap", "dur", "wait"):
            of = getattr(ops, name)
            columns[name] = of and [of[k] for k in own]
        if own:
            yield replace(ops, **columns)
        if ops.thread:
            return
        for split, device, plan, n in self.plans[ops.plan]:
            if device not in self.described:
                self.described.add(device)
                self.lines.append(s.Device(
                    t=ops.t, name=device, description="a device", clock="bounded", tick=1.0,
                    uncertainty=40,
                ))  # fmt: skip
            gap, dur = ([random.randint(0, 900) for _ in range(n)] for _ in range(2))
            self.lines.append(s.Ops(
                t=ops.t + random.randint(0, 2000), compute=ops.compute, plan=plan, device=device,
                split=split, gap=[0, *gap[1:]], dur=dur,
            ))  # fmt: skip
        parts = self.parts[self.graphs[ops.plan]]
        gap, dur = ([random.randint(0, 5000) for _ in parts] for _ in range(2))
        yield s.Splits(
            t=ops.t, compute=ops.compute, split=[*range(len(parts))], gap=gap, dur=dur,
            asynchronous=[int(of.backend in DEVICES) * random.getrandbits(1) for of in parts],
        )  # fmt: skip


def _some(plan: s.Plan, kernels: Sequence[int]) -> s.Plan:
    n = plan.n and [plan.n[k] for k in kernels]
    return replace(plan, node=[plan.node[k] for k in kernels], n=n)
