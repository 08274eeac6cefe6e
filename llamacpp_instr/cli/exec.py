"""`instr exec`: record a program that knows nothing of this package."""

from __future__ import annotations

import click

from llamacpp_instr.schema import LEVELS


@click.command(
    name="exec",
    # everything from the command's name on is the command's
    context_settings={"allow_interspersed_args": False},
    epilog="""\b
Examples:
  instr exec -- python app.py --port 8080
  instr exec --level verbose --log server-%p.log -- uvicorn app:app --workers 4
""",
)
@click.option(
    "--log",
    metavar="FILE",
    help="The log to write; %p is the process id (the command's name-%p.log).",
)
@click.option(
    "--level",
    default="detailed",
    show_default=True,
    type=click.Choice(LEVELS),
    help="How much is recorded.",
)
@click.option(
    "--stats",
    metavar="PATTERN",
    help="Record the values of tensors whose names this regular expression finds.",
)
@click.option(
    "--on-log-error",
    default="continue",
    show_default=True,
    type=click.Choice(["continue", "stop"]),
    help="What to do when a log cannot be written any more.",
)
@click.option("--force", is_flag=True, help="Overwrite the log if it exists.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def exec_(
    ctx: click.Context,
    log: str | None,
    level: str,
    stats: str | None,
    on_log_error: str,
    force: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND and record every process of it that uses llama-cpp-python.

    Its input, output and exit code stay its own. The paths of the logs go to standard error.
    """
    from llamacpp_instr.execute import execute

    done = execute(
        command,
        log=log,
        level=level,
        stats=stats,
        on_log_error="stop" if on_log_error == "stop" else "continue",
        force=force,
    )
    for path in done.logs:
        click.echo(f"log: {path}", err=True)
    if not done.logs:
        click.echo("no log was written: no process of the command loaded a model", err=True)
    ctx.exit(done.exit_code)
