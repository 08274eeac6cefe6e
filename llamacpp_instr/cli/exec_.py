"""`instr exec`: records a program that does not use this package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from llamacpp_instr.cli import recording
from llamacpp_instr.cli.options import bytes_of_size, command


@command(
    "instr exec -- python app.py --port 8080",
    "instr exec --level verbose --log server-%p.log -- uvicorn app:app --workers 4",
    "instr exec --rotate 1GB -- python app.py --port 8080",
    "instr exec --live -- python app.py --port 8080",
    # all options after the command's name belong to the command
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--log",
    metavar="FILE",
    help="The log to write; %p is the process id.  [default: the command's name-%p.log]",
)
@recording.level_option
@recording.stats_option
@recording.log_error_option
@click.option(
    "--rotate",
    metavar="SIZE",
    callback=bytes_of_size,
    help="Continue in another file, .part2 and so on, beyond this size; each is a complete log.",
)
@click.option("--force", is_flag=True, help="Replace the log and its parts if they exist.")
@click.option(
    "--keep-args",
    is_flag=True,
    help="Keep arguments that look like secrets, instead of [redacted].",
)
@recording.live_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def exec_(
    log: str | None,
    live: bool,
    command: tuple[str, ...],
    **recorded: Any,
) -> None:
    """Run any program and record its models as logs.

    Every process of COMMAND that uses llama-cpp-python writes a log. Input, output and exit status
    are those of COMMAND. The paths of the logs go to standard error, with what is missing in a log
    if it is incomplete. --force replaces only files that begin like a log. An old log is kept until
    the command has begun a new one.

    A log contains the arguments of its process without secrets. [redacted] replaces the VALUE of
    --NAME VALUE, NAME=VALUE and NAME: VALUE if NAME ends in, or contains as a word, key, token,
    secret, password, passwd, passphrase, credential(s), auth or authorization. It also replaces
    words that begin with sk-, hf_, gh?_ or github_pat_, and passwords in URLs.
    """
    from llamacpp_instr.base.terminal import notice
    from llamacpp_instr.recording.session import logs_of
    from llamacpp_instr.run.exec import execute, log_target

    target = log_target(command, log)
    before = logs_of(target)

    def first_log() -> Path | None:
        return next((path for path, of in logs_of(target).items() if before.get(path) != of), None)

    with recording.watched(live, first_log):
        done = execute(command, log, **recorded)
    for path, missing in done.logs.items():
        notice(f"incomplete log: {path}: {missing}" if missing else f"log: {path}")
    if not done.logs:
        notice(
            f"no log was written: the program loaded {done.other_library}, which is not the "
            "instrumented library; run `instr build` in its environment"
            if done.other_library
            else "no log was written: no process of the command loaded a model with the llama_cpp "
            "of `instr build`, or it records itself, or no log could be created"
        )
    sys.exit(done.exit_code)
