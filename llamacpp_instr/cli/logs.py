"""The logs that a command reads: several, groups of them, and damaged ones; and the bound on the
size of their trace."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import OnProgress, notice, progress_bar
from llamacpp_instr.cli import options as cli

if TYPE_CHECKING:
    from llamacpp_instr.log.reader import EventReader
    from llamacpp_instr.log.runs import Run
    from llamacpp_instr.log.session import Session


@dataclass(frozen=True)
class Logs:
    """The logs that a command reads."""

    names: tuple[str, ...]
    lenient: bool = False

    def sessions(self, computes: bool = True) -> list[Session]:
        """The session of each run of the logs (`log.runs`), with a progress bar for each."""
        from llamacpp_instr.log.runs import find_runs

        return [load_run(run, self.lenient, computes) for run in find_runs(self.names)]

    @contextmanager
    def converting(self, bound: SizeBound) -> Iterator[list[EventReader]]:
        """The events of each run, with a progress bar, for a trace of a size within `bound`. At the
        end, notices say what is missing from each log that is not whole."""
        from llamacpp_instr.log.runs import find_runs, read_run

        runs = find_runs(self.names)
        with progress_bar(f"Converting {', '.join(run.name for run in runs)}") as on_progress:
            readers = [read_run(run, self.lenient, bound.seen_by(on_progress)) for run in runs]
            yield readers
        notice_ends(readers)

    def write_trace(
        self, trace: str | Path, cure: str, *, force: bool = False, flows: bool = False
    ) -> None:
        """Write all steps as a trace for Perfetto's UI. Raises UsageError with `cure`, what to do
        instead, if it would be larger than the UI can open."""
        from llamacpp_instr.base.output import open_output
        from llamacpp_instr.converters.exports.perfetto import Options, write_perfetto

        options = Options(flows=flows, lenient=self.lenient)
        bound = SizeBound(MAX_TRACE, whole=True, cure=cure)
        with self.converting(bound) as (first, *others), open_output(trace, force) as file:
            write_perfetto(first, bound.counted(file), options, others)


def several_logs(metavar: str, **settings: Any) -> Any:
    """For a command that takes one or more logs: `Logs`."""
    names = cli.argument(metavar=metavar, nargs=-1, required=True, **settings)
    return cli.gathered(Logs, names=names, lenient=cli.LENIENT)


LOGS = several_logs("LOG...")


def notice_ends(readers: Sequence[EventReader]) -> None:
    """Print a notice for each log that was read and is not whole."""
    for reader in readers:
        if reader.end is not None and (sentence := reader.end.sentence()):
            notice(f"{reader.path}: {sentence}")


def _split(_ctx: click.Context, _param: click.Parameter, groups: Any) -> list[tuple[str, ...]]:
    return [tuple(group.split("\0")) for group in groups]


def group(text: str, metavar: str) -> Any:
    """An option of a GroupedCommand that takes several logs: a list of tuples of names, one for
    each time that it is given."""
    return cli.option(text, metavar, multiple=True, callback=_split)


class GroupedCommand(click.Command):
    """A command whose group options take every value up to the next option, as a shell expands
    A*.log."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        grouping = {name for of in self.params if of.callback is _split for name in of.opts}
        joined: list[str] = []
        n_taken = -1  # values of the option; no option if negative
        for arg in args:
            if n_taken < 0 or (arg != "-" and arg.startswith("-")) or (n_taken and self.ends(arg)):
                n_taken = 0 if arg in grouping else -1
                joined.append(arg)
            else:
                # no name of a file has this character
                joined[-1:] = [f"{joined[-1]}\0{arg}"] if n_taken else [joined[-1], arg]
                n_taken += 1
        return super().parse_args(ctx, joined)

    def ends(self, _value: str) -> bool:
        """Whether a value does not belong to the group before it."""
        return False


def load_run(run: Run, lenient: bool = False, computes: bool = True) -> Session:
    """The session of a run, with a progress bar."""
    from llamacpp_instr.log.session import load_session

    with progress_bar(f"Reading {run.name}") as on_progress:
        return load_session(run, on_progress, lenient, computes=computes)


def is_model(source: str) -> bool:
    """Whether an argument that may be a model or a log is a model."""
    from llamacpp_instr.base.output import begins_as_model

    return source == "demo" or source.lower().endswith(".gguf") or begins_as_model(source)


MAX_TRACE = 10**9
"""bytes that the UI can open"""
SAMPLE, LARGE = 16_000_000, 100_000_000
"""bytes of a trace above which its size is estimated, and above which a notice is printed"""

MAX_SIZE = cli.option(
    "Refuse to write a larger trace.", "SIZE", default="1GB", callback=cli.bytes_of_size
)


class SizeBound:
    """Counts the bytes of a trace, and ends its writing with a UsageError as soon as it is, or will
    be, larger than `most`. If the `whole` log is traced, the share of the log that was read
    predicts the final size; for a range of steps, only the bytes written count."""

    def __init__(self, most: int, whole: bool, cure: str = "") -> None:
        self._most, self._whole, self._cure = most, whole, cure
        self._written = self._before = self._done = 0
        self._has_warned = False

    def seen_by(self, report: OnProgress) -> OnProgress:
        """The function for the progress of reading, which is passed on to `report`."""

        def on_progress(done: int, total: int) -> None:
            if done < self._done:
                self._before = self._written  # of the next log
            self._done = done
            of_this = self._written - self._before
            if self._whole and done and of_this > SAMPLE:
                self._expect(self._before + of_this * total // done)
            report(done, total)

        return on_progress

    def take(self, n_bytes: int) -> None:
        self._written += n_bytes
        if self._written > self._most:
            self._expect(self._written)

    def _expect(self, size: int) -> None:
        if size > self._most:
            allowed = math.ceil(1.2 * size / 1e9)
            cure = self._cure or f"choose steps with --steps A-B, or give --max-size {allowed}GB"
            raise UsageError(f"the trace would have about {size / 1e6:,.0f} MB; {cure}")
        if size > LARGE and not self._has_warned:
            self._has_warned = True
            notice(f"the trace will have about {size / 1e6:,.0f} MB")

    def counted(self, file: BinaryIO) -> BinaryIO:
        """The file to write to, whose bytes count."""
        self._file, self.flush = file, file.flush
        return cast(BinaryIO, self)

    def write(self, data: Any) -> int:
        self.take(len(data))
        return self._file.write(data)
