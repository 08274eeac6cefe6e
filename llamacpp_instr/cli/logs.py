"""The logs that a command reads: several, groups of them, and damaged ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from llamacpp_instr.cli.options import gathered, lenient_option

if TYPE_CHECKING:
    from llamacpp_instr.cli.size_bound import SizeBound
    from llamacpp_instr.log.reader import EventReader
    from llamacpp_instr.log.runs import Run
    from llamacpp_instr.log.session import Session


@dataclass(frozen=True)
class Logs:
    """The logs that a command reads."""

    names: tuple[str, ...]
    lenient: bool

    def sessions(self) -> list[Session]:
        """The session of each run of the logs (`log.runs`), with a progress bar for each."""
        from llamacpp_instr.log.runs import find_runs

        return [load_run(run, self.lenient) for run in find_runs(self.names)]

    @contextmanager
    def converting(self, bound: SizeBound) -> Iterator[list[EventReader]]:
        """The events of each run, with a progress bar, for a trace of a size within `bound`. At the
        end it says of each log that is not whole what is missing."""
        from llamacpp_instr.base.terminal import progress_bar
        from llamacpp_instr.log.runs import find_runs, read_run

        runs = find_runs(self.names)
        with progress_bar(f"Converting {', '.join(run.name for run in runs)}") as on_progress:
            readers = [read_run(run, self.lenient, bound.seen_by(on_progress)) for run in runs]
            yield readers
        notice_ends(readers)


def log_options_of(metavar: str, **settings: Any) -> Callable[[Any], Any]:
    """For a command that takes one or more logs, which gets them as `logs: Logs`."""
    argument = click.argument("names", metavar=metavar, nargs=-1, required=True, **settings)
    return gathered("logs", Logs, argument, lenient_option)


log_options = log_options_of("LOG...")


def notice_ends(readers: Sequence[EventReader]) -> None:
    """Print a notice for each log that was read and is not whole."""
    from llamacpp_instr.base.terminal import notice

    for reader in readers:
        if reader.end is not None and (sentence := reader.end.sentence()):
            notice(f"{reader.path}: {sentence}")


def _split(_ctx: click.Context, _param: click.Parameter, groups: Any) -> list[tuple[str, ...]]:
    return [tuple(group.split("\0")) for group in groups]


def group_option(name: str, metavar: str, what: str) -> Callable[[Any], Any]:
    """An option of a GroupedCommand that takes several logs: a list of tuples of names, one for
    each time that it is given."""
    return click.option(name, multiple=True, callback=_split, metavar=metavar, help=what)


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


def load_run(run: Run, lenient: bool = False) -> Session:
    """The session of a run, with a progress bar."""
    from llamacpp_instr.base.terminal import progress_bar
    from llamacpp_instr.log.session import load_session

    with progress_bar(f"Reading {run.name}") as on_progress:
        return load_session(run, on_progress, lenient)


def is_model(source: str) -> bool:
    """Whether an argument that may be a model or a log is a model."""
    from llamacpp_instr.base.output import begins_as_model

    return source == "demo" or source.lower().endswith(".gguf") or begins_as_model(source)
