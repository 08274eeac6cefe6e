"""The tables of several sessions as one set, whose column `log` names the session of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pandas as pd

from converters.exports.tables import stream_tables
from llamacpp_instr.log.reader import LogEnd
from llamacpp_instr.log.runs import Run
from llamacpp_instr.progress import OnProgress
from llamacpp_instr.terminal import printable


def stream_runs(
    runs: Sequence[Run],
    on_progress: OnProgress | None = None,
    on_end: Callable[[Run, LogEnd], object] = lambda _run, _end: None,
    lenient: bool = False,
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields the tables of each run as `stream_tables` does, one run after the other. The rows of
    several have a first column `log` with the run's name: ids, such as those of steps, count anew
    in each. `on_end` is called after each. Raises like `stream_tables`."""
    for run in runs:
        ends: list[LogEnd] = []
        for name, frame in stream_tables(run, on_progress, ends.append, lenient):
            if len(runs) > 1:
                name_of_log = printable(run.name)
                logs = pd.Categorical([name_of_log] * len(frame), categories=[name_of_log])
                frame.insert(0, "log", pd.Series(logs, frame.index))
            yield name, frame
        on_end(run, *ends)
