"""Pictures of schedules: engines over time, and the speed-up over the number of engines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from converters.report.charts import Chart
from converters.report.lane_chart import Bar, curve_chart, lane_chart
from converters.scheduling.critical import critical_path
from converters.scheduling.schedule import Schedule
from converters.scheduling.sweep import SweepPoint

MOST_LANES = 32
MOST_BARS = 4000


def gantt_chart(made: Schedule, title: str) -> Chart | None:
    """A row for each engine, with its tasks in the colour of their block, and transfers; what is on
    the critical path is marked. None if there are too many engines or tasks to be drawn."""
    engines, tasks = made.engines, made.tasks
    if engines.count() > MOST_LANES or not 0 < len(tasks) <= MOST_BARS:
        return None
    critical = {(part.task, part.what) for part in critical_path(made)}
    bars = []
    for task in range(len(tasks)):
        label = tasks.labels[tasks.label[task]]
        bars.append(
            Bar(
                int(made.engine[task]), int(made.begin[task]), int(made.end[task]), label.block,
                label.name, (task, "task") in critical,
            )
        )  # fmt: skip
    for task in np.flatnonzero(made.transfer_engine >= 0).tolist():
        label = tasks.labels[tasks.label[task]]
        bars.append(
            Bar(
                int(made.transfer_engine[task]), int(made.transfer_begin[task]),
                int(made.transfer_end[task]), "load", label.name, (task, "transfer") in critical,
            )
        )  # fmt: skip
    lanes = [engines.name(engine) for engine in range(engines.count())]
    return lane_chart(title, lanes, bars, "critical path")


def sweep_chart(points: Sequence[SweepPoint], title: str) -> Chart:
    """The speed-up over the number of engines, and the most that the bounds allow."""
    counts = [float(point.engines) for point in points]
    curves = {
        "speed-up": [point.speed_up for point in points],
        "at most": [point.most for point in points],
    }
    return curve_chart(title, "engines", "speed-up", counts, curves)
