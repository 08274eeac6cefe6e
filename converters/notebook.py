"""`llamacpp_instr.load`: a session that shows itself in a notebook.

Invariant: every figure comes from the function that the command of the same name prints.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.output import check_not_input, open_output
from llamacpp_instr.base.terminal import counted, printable, progress_bar
from llamacpp_instr.converters.analyses.diff import compute_diff
from llamacpp_instr.converters.analyses.findings import Facts, Finding, find_causes
from llamacpp_instr.converters.analyses.page import compute_page
from llamacpp_instr.converters.analyses.stats import OfStep, step_values
from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.log.runs import find_runs
from llamacpp_instr.log.session import Session, Table, load_session
from llamacpp_instr.log.steps import PHASES, Account, counted_steps
from llamacpp_instr.prediction.probe.file import Probe, known_probe
from llamacpp_instr.report.charts import import_matplotlib, missing_note
from llamacpp_instr.report.page import render_page, render_part
from llamacpp_instr.report.render import render_text
from llamacpp_instr.report.report import Report

if TYPE_CHECKING:
    import pandas as pd

    from llamacpp_instr.converters.exports.tables import Tables


def load(path: str | Path, *parts: str | Path, lenient: bool = False) -> LoadedLog:
    """The session of the log at `path`, plain or compressed (.gz, .zst), closed or not; for a
    rotated log, name all parts. `lenient` leaves damaged lines out.

    Raises LogError, with the line, if the log cannot be read; UsageError if the logs are of
    different sessions or one is named twice.
    """
    paths = (path, *parts)
    run, *others = find_runs(paths)
    if others:
        raise UsageError(
            f"{run.name} and {others[0].name} are different sessions; load each on its own"
        )
    with progress_bar(f"Reading {run.name}") as on_progress:
        return LoadedLog(load_session(run, on_progress, lenient, every_thread=True), paths)


class LoadedLog:
    """A session. A notebook shows what `instr summary` prints. Computes on first use.

    Each `plot_` method draws into `axes`, by default into a new figure of pyplot, and returns the
    axes. They raise UsageError if matplotlib is missing, or the log has nothing to draw.
    """

    def __init__(self, session: Session, paths: tuple[str | Path, ...]) -> None:
        self._session = session
        self._paths = paths

    def __repr__(self) -> str:
        counts = {"step": len(self._session.steps), "request": len(self.requests)}
        text = ", ".join(counted(n, what) for what, n in counts.items())
        return f"<{printable(self._session.path)}: {text}>"

    def _repr_html_(self) -> str:
        return render_part(self._summary)

    @cached_property
    def tables(self) -> Tables:
        """The DataFrames of the session; `help(log.tables)` describes their columns."""
        from llamacpp_instr.converters.exports.tables import tables_of

        return tables_of(self._session)

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """A row for each kernel, with the time that its device spent in it, or else thread 0, which
        takes part in all others: the rows of `tables.ops` for these, and the columns `request` and
        `sequence` of the step, which are missing for a step of none or of several. The sum of `dur`
        is that of the summary for the same steps."""
        ops = self.tables.ops
        found: pd.DataFrame = ops[ops.thread <= 0].reset_index(drop=True)
        steps = self._session.steps
        keys: tuple[OfStep, ...] = ("request", "sequence")
        for key in keys:
            values = step_values(self._session, steps, key)
            pairs = zip(steps["step"].tolist(), values, strict=True)
            of_step = {step: number for step, number in pairs if isinstance(number, int)}
            found[key] = found.step.map(of_step).astype("Int64")
        return found

    @cached_property
    def requests(self) -> pd.DataFrame:
        """`tables.requests`: a row for each request."""
        from llamacpp_instr.converters.exports.tables import requests_of

        return requests_of(self._session)

    @cached_property
    def findings(self) -> pd.DataFrame:
        """What made the session slow, the costliest first: the findings of the summary. Columns:
        rule (a name that does not change), what, share, of (what the share is of), advice."""
        import pandas as pd

        found = find_causes(Facts(Account(self._session, self._counted), self._probe))
        table: pd.DataFrame = pd.DataFrame(found, columns=list(Finding._fields))
        return table

    def diff(self, other: LoadedLog, by: str | None = None, phase: str | None = None) -> LoadedDiff:
        """The differences of `other` from this log, as `instr diff` prints them. `by` is one of
        phase, block, layer, op and tensor. Raises UsageError if nothing can be compared."""
        return LoadedDiff(compute_diff([self._session], [other._session], by, phase).reports)

    def page(self, path: str | Path, force: bool = False) -> None:
        """Write the page of `instr page` to a file. Raises UsageError if it exists and `force` is
        not set, or if it cannot be created; InstrError if writing fails."""
        check_not_input(path, *self._paths)
        if not force and Path(path).exists():
            raise UsageError(f"{path} exists; pass force=True to overwrite it")
        text = render_page(*compute_page([self._session], self._probe))
        with open_output(path, force) as file:
            file.write(text.encode())

    def plot_speed(self, axes: Any = None) -> Any:
        """Tokens per second of each step that counts, over the seconds since the session began."""
        steps = self._counted
        steps = steps.rows((steps["n_tokens"] > 0) & (steps["end"] > steps["begin"]))
        axes = _axes(axes, len(steps), "no steps with tokens")
        dur = steps["end"] - steps["begin"]
        seconds = (steps["begin"] + dur // 2 - self._session.start.t) / 1e9
        for phase in PHASES:
            of = steps["phase"] == phase
            if of.any():
                axes.plot(seconds[of], steps["n_tokens"][of] / dur[of] * 1e9, ".", label=phase)
        return _labelled(axes, xlabel="seconds", ylabel="tokens/s of each step", ylim=(0, None))

    def plot_requests(self, axes: Any = None) -> Any:
        """Seconds from the arrival of each request (its first step, if unknown) to its first token
        and to its end, over the seconds of its arrival since the session began."""
        requests = self.requests
        axes = _axes(axes, len(requests), "no requests")
        first = requests.arrival.fillna(requests.begin)
        for column, label in (("first_token", "to the first token"), ("end", "total")):
            known = requests[column].notna()
            waited = (requests[column] - first)[known] / 1e9
            seconds = (first[known] - self._session.start.t) / 1e9
            axes.plot(seconds.astype(float), waited.astype(float), ".", label=label)
        return _labelled(axes, xlabel="seconds", ylabel="seconds of a request", ylim=(0, None))

    def plot_blocks(self, axes: Any = None) -> Any:
        """Milliseconds of the steps by block and phase: "Where the time went" of the summary."""
        found = [of for of in self._summary if of.key == "where_the_time_went"]
        axes = _axes(axes, sum(len(of.rows) for of in found), "no computes")
        (where,) = found
        names = [str(row[0]) for row in where.rows]
        before = [0.0] * len(names)
        for i, column in enumerate(where.columns):
            if column.unit == "ns":
                spent = [float(row[i] or 0) / 1e6 for row in where.rows]
                axes.barh(names, spent, left=before, label=column.name)
                before = [sum(both) for both in zip(before, spent, strict=True)]
        axes.invert_yaxis()
        return _labelled(axes, xlabel="ms")

    @cached_property
    def _summary(self) -> list[Report]:
        return compute_summary(self._session, self._probe)

    @cached_property
    def _probe(self) -> Probe | None:
        return known_probe()

    @cached_property
    def _counted(self) -> Table:
        return counted_steps(self._session)[0]


class LoadedDiff:
    """The differences of two sessions. A notebook and `print` show what `instr diff` prints."""

    def __init__(self, reports: list[Report]) -> None:
        self._reports = reports

    def __repr__(self) -> str:
        return render_text(self._reports)

    def _repr_html_(self) -> str:
        return render_part(self._reports)

    @cached_property
    def tables(self) -> dict[str, pd.DataFrame]:
        """Each table that is shown, with the names that JSON has and unrounded numbers."""
        import pandas as pd

        return {of.key: pd.DataFrame(of.rows, columns=of.keys()) for of in self._reports}


def _axes(axes: Any, n: int, nothing: str) -> Any:
    """Where to draw `n` things; `nothing` is what the log has if there are none."""
    if not n:
        raise UsageError(f"nothing to plot: the log has {nothing}")
    if axes is not None:
        return axes
    if note := missing_note():
        raise UsageError(note)
    import_matplotlib()
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained")[1]


def _labelled(axes: Any, **settings: Any) -> Any:
    axes.set(**settings)
    axes.legend()
    return axes
