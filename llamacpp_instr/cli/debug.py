"""`instr debug`: stops a model between two ops."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli.options import (
    chat_option,
    command,
    context_options,
    force_option,
    given_options,
)
from llamacpp_instr.cli.serving import Serving, serving_options

if TYPE_CHECKING:
    from llamacpp_instr.llama.engine import ContextOptions


class _Debug(click.Command):
    """Everything after -- is the program's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["program"] = args[at + 1 :] if at < len(args) else None
        return super().parse_args(ctx, args[:at])


@command(
    'instr debug demo --prompt "Once upon a time" --break "l_out-3"',
    'instr debug model.gguf -p "Hello" --break "ffn_out-* if absmax > 60 or nan"',
    'instr debug --break "block=attention layer=2" -- app.py --port 8080',
    'instr debug demo --prompt "Once upon a time" --page',
    "instr debug demo --dap-port 4711",
    cls=_Debug,
)
@click.argument("model", required=False)
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt; - is not possible here.")
@click.option("-n", default=16, show_default=True, help="Tokens to generate at most.")
@click.option(
    "-b",
    "--break",
    "breakpoints",
    multiple=True,
    metavar="TEXT",
    help="A breakpoint, as `help break` describes it; may be repeated.  [default: the first op]",
)
@click.option(
    "--log",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The log to write.  [default: debug.log, or debug-2.log and so on if that exists]",
)
@force_option
@chat_option
@context_options
@click.option(
    "--dap",
    is_flag=True,
    help="Speak the Debug Adapter Protocol with an editor over standard input and output.",
)
@click.option(
    "--dap-port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="The same over TCP, at a port of 127.0.0.1; 0 takes a free one.",
)
@click.option("--page", is_flag=True, help="Stop, look and change in the browser.")
@serving_options(" of the page")
@click.pass_context
def debug(
    ctx: click.Context,
    model: str | None,
    prompt: str | None,
    n: int,
    breakpoints: tuple[str, ...],
    log: Path | None,
    force: bool,
    chat: bool,
    context: ContextOptions,
    dap: bool,
    dap_port: int | None,
    page: bool,
    serving: Serving,
) -> None:
    """Stop a model between two ops, to read and change values.

    MODEL is a GGUF file, or demo for the demo model; or give a Python program after --, which runs
    in this process. A compute stops after an op, when its result is there. Commands are read from
    standard input; `help` lists them. The generated text goes to standard output, everything else
    to standard error.

    With --dap or --dap-port an editor gives the commands, and its launch configuration the options.
    With --page a browser gives them, at an address of 127.0.0.1.
    """
    if not page and given_options("port", "no_browser"):
        raise UsageError("--port and --no-browser are for --page")
    if dap or dap_port is not None:
        for option in given_options():
            if option not in ("--prompt", "--dap", "--dap-port"):
                raise UsageError(f"{option} is not for --dap; the launch configuration has it")
        if ctx.meta["program"] is not None:
            raise UsageError("--dap is for models; leave out the program after --")
        if dap and dap_port is not None:
            raise UsageError("--dap and --dap-port exclude each other")
        from llamacpp_instr.run.debugging import serve_editor

        serve_editor(model, prompt, dap_port)
        return
    from llamacpp_instr.debugger.terminal import Terminal
    from llamacpp_instr.recording.session import fresh_log
    from llamacpp_instr.run import debugging
    from llamacpp_instr.run.session import RunOptions

    program: Sequence[str] | None = ctx.meta["program"]
    default = Path("debug.log")
    log = log or (default if force else fresh_log(default))
    if str(log) == "-":
        raise UsageError("the log must be a file; give --log the name of one")
    if program is not None and (model is not None or prompt is not None):
        raise UsageError("give a model with --prompt, or a program after --, not both")
    if program is None and (model is None or prompt is None):
        raise UsageError("give a model and --prompt TEXT, or a program after --")
    if program is not None:
        if page:
            debugging.debug_program_on_page(
                program, log, force, breakpoints, serving.port or 0, serving.show
            )
        else:
            debugging.debug_program(program, Terminal(breakpoints), log, force)
        return
    assert model is not None
    assert prompt is not None
    if page:
        given = {"model": model, "prompt": prompt, "n": n, "chat": chat, "log": str(log)}
        arguments = {**given, "force": force, **_camel(context)}
        ctx.exit(
            debugging.debug_model_on_page(arguments, breakpoints, serving.port or 0, serving.show)
        )
    else:
        options = RunOptions(model, [prompt], log, n, chat=chat, context=context, force=force)
        debugging.debug_model(options, Terminal(breakpoints))


def _camel(context: ContextOptions) -> dict[str, Any]:
    """As a launch configuration has them."""
    from dataclasses import asdict

    return {
        re.sub(r"_(.)", lambda match: match[1].upper(), name): value
        for name, value in asdict(context).items()
    }
