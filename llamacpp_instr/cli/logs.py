"""The logs that a command reads: several, and damaged ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from llamacpp_instr.errors import UsageError

if TYPE_CHECKING:
    from llamacpp_instr.log.session import Session

lenient_option = click.option(
    "--lenient",
    is_flag=True,
    help="Leave out damaged lines and events that refer to them; count them.",
)


def load_sessions(logs: Sequence[str], lenient: bool = False) -> list[Session]:
    """The session of each run of `logs` (`log.runs`), with a progress bar for each."""
    from llamacpp_instr.log.runs import find_runs
    from llamacpp_instr.log.session import load_session
    from llamacpp_instr.progress import progress_bar

    sessions = []
    for run in find_runs(logs):
        with progress_bar(f"Reading {run.name}") as on_progress:
            sessions.append(load_session(run, on_progress, lenient))
    return sessions


def load_one_session(logs: Sequence[str], lenient: bool, what: str) -> Session:
    """The only session of `logs`, which may be its parts. Raises UsageError if there are several;
    `what` is what takes only one."""
    session, *others = load_sessions(logs, lenient)
    if others:
        raise UsageError(
            f"{what} takes one session, and {others[0].path} is another; instr summary takes"
            " several"
        )
    return session
