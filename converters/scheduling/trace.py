"""A schedule as a Perfetto trace: a track for each engine, the critical path, counters.

Invariant: the trace holds what the report says: the slice of the whole schedule is as long as the
makespan, an engine's slices are as long as it is busy, and those of the critical path add up to the
makespan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.exports.perfetto.packets import (
    BEGIN,
    Packets,
    Value,
    closing,
    event_packet,
    first_packets,
    sample,
    track,
)
from llamacpp_instr.converters.scheduling.report import Part, critical_path
from llamacpp_instr.converters.scheduling.schedule import Schedule

MOST_TASKS = 200_000
_HOME, _PATH, _ENGINES, _COUNTERS, _FIRST_ENGINE = 1, 2, 3, 4, 1000
"""numbers of tracks; counters follow _COUNTERS, engines _FIRST_ENGINE"""


def write_trace(made: Schedule, write: Callable[[bytes], object], title: str) -> None:
    """Writes the schedule, from 0 on, in pieces. `title` names its source. Slices of engines have
    category `task`, `critical` (on the critical path) or `transfer`; flows lead from each task to
    those that read its result. Raises UsageError for too many tasks."""
    if len(made.tasks) > MOST_TASKS:
        raise UsageError(
            f"{len(made.tasks)} tasks are too many for a trace, which takes up to {MOST_TASKS};"
            " choose a layer"
        )
    _Writer(made, write).run(title)


class _Writer:
    def __init__(self, made: Schedule, write: Callable[[bytes], object]) -> None:
        self._made, self._output = made, write
        self._packets = Packets()
        self._path = critical_path(made)
        self._critical = {(part.task, part.what) for part in self._path}
        self._work = made.activities
        self._out: list[list[int]] = [[] for _ in range(len(made.tasks))]
        """of each task: the numbers of the flows that leave it"""
        for number, source in enumerate(made.tasks.sources.tolist()):
            self._out[source].append(number)
        self._n_flows = len(made.tasks.sources)

    def run(self, title: str) -> None:
        made, engines = self._made, self._made.engines
        self._output(first_packets(0, 0))
        self._output(track(_HOME, "schedule", note=title))
        self._output(
            track(
                _PATH, "critical path", _HOME, 0,
                "What the makespan consists of; each part began when the previous one ended.",
            )
        )  # fmt: skip
        self._output(track(_ENGINES, "engines", _HOME, 1))
        for engine in range(engines.count()):
            self._output(track(_FIRST_ENGINE + engine, engines.name(engine), _ENGINES, engine))
        if not len(made.tasks):
            return
        whole: dict[str, Value] = {"makespan_ns": made.makespan, "policy": made.policy}
        if made.proven is not None:
            whole["proven_ns"] = made.proven
        self._slice(_HOME, title, "schedule", 0, made.makespan, whole)
        self._engines()
        for part in self._path:
            self._part(part)
        self._counters()

    def _slice(
        self,
        on: int,
        name: str,
        category: str,
        begin: int,
        end: int,
        args: dict[str, Value],
        colour: str = "",
        out: Iterable[int] = (),
        into: Iterable[int] = (),
    ) -> None:
        event = self._packets.event(BEGIN, on, name, category, colour=colour)
        self._packets.add_args(event, args, keep=True)
        event.flow_ids.extend(flow + 1 for flow in out)
        event.terminating_flow_ids.extend(flow + 1 for flow in into)
        for packet in (event_packet(begin, event), event_packet(end, closing(on))):
            if interned := self._packets.take_interned():
                self._output(interned)
            self._output(packet)

    def _engines(self) -> None:
        """Engines that bring loads come first: of slices that begin together, a flow has to leave
        one before it arrives at another."""
        engine, begin = self._work.engine, self._work.begin
        brings = {engine[transfer] for transfer in self._work.transfer_of.values()}
        for of in sorted(
            range(len(engine)), key=lambda of: (engine[of] not in brings, engine[of], begin[of])
        ):
            self._activity(_FIRST_ENGINE + engine[of], of)

    def _activity(self, on: int, of: int) -> None:
        made, tasks, task = self._made, self._made.tasks, self._work.task[of]
        label = tasks.label_of(task)
        begin, end = self._work.begin[of], self._work.end[of]
        critical = (task, "task" if of == task else "transfer") in self._critical
        args: dict[str, Value] = {"name": label.name}
        if of != task:
            args |= {
                "layer": label.layer, "block": label.block, "critical": critical,
                "bytes": int(tasks.load[task]),
                "for_engine": made.engines.name(int(made.engine[task])),
            }  # fmt: skip
        else:
            args |= {
                "op": label.op, "kind": label.kind, "layer": label.layer, "block": label.block,
                "copy": int(tasks.copy[task]), "recorded_ns": int(tasks.ns[task]),
                "speed": float(tasks.ns[task]) / (end - begin), "bytes": int(tasks.bytes[task]),
            }  # fmt: skip
        cause = self._work.cause(of)
        ended = f": {tasks.label_of(self._work.task[cause.of]).name}" if cause.of >= 0 else ""
        args["waited_for"] = cause.after + ended
        brought = [self._n_flows + task] if task in self._work.transfer_of else []
        if of != task:
            name = f"load {label.title}"
            self._slice(on, name, "transfer", begin, end, args, "load", brought)
            return
        category = "critical" if critical else "task"
        into = [*range(int(tasks.first[task]), int(tasks.first[task + 1])), *brought]
        self._slice(on, label.title, category, begin, end, args, label.block, self._out[task], into)

    def _part(self, part: Part) -> None:
        label = self._made.tasks.label_of(part.task)
        args: dict[str, Value] = {
            "what": part.what, "name": label.name, "layer": label.layer, "block": label.block,
            "after": part.after,
        }  # fmt: skip
        if part.engine >= 0:
            args["engine"] = self._made.engines.name(part.engine)
        name = label.title if part.what == "task" else f"{part.what} {label.title}"
        colour = label.block if part.what == "task" else part.what
        self._slice(_PATH, name, "path", part.begin, part.end, args, colour)

    def _counters(self) -> None:
        made, work = self._made, self._work
        begin, end = np.array(work.begin, np.int64), np.array(work.end, np.int64)
        rate = work.moved / (end - begin) * 1e9
        one = np.ones(len(begin), np.int64)
        kind = np.array(made.engines.kind_numbers())[work.engine]
        chosen = [("busy engines", "engines", one)]
        if len(made.engines.kinds) > 1:
            chosen += [
                (f"busy {of.name}", "engines", (kind == number).astype(np.int64))
                for number, of in enumerate(made.engines.kinds)
            ]
        if made.tasks.bytes.any():
            chosen.append(("bytes/s in flight", "B/s", np.rint(rate).astype(np.int64)))
        times, where = np.unique(np.concatenate((begin, end)), return_inverse=True)
        for number, (name, unit, amount) in enumerate(chosen, _COUNTERS):
            self._output(track(number, name, _HOME, number, unit=unit))
            sums = np.zeros(len(times), np.int64)
            np.add.at(sums, where, np.concatenate((amount, -amount)))
            for t, value in zip(times.tolist(), np.cumsum(sums).tolist(), strict=True):
                self._output(sample(t, number, value))
