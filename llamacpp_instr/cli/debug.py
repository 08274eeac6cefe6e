"""`instr debug`: stops a model between two ops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click import IntRange

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli import options as cli

if TYPE_CHECKING:
    from llamacpp_instr.llama.engine import ContextOptions


class _Debug(click.Command):
    """Everything after -- is the program's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["program"] = args[at + 1 :] if at < len(args) else None
        return super().parse_args(ctx, args[:at])


@cli.command(
    'instr debug demo --prompt "Once upon a time" --break "l_out-3"',
    'instr debug model.gguf -p "Hello" --break "ffn_out-* if absmax > 60 or nan"',
    'instr debug --break "block=attention layer=2" -- app.py --port 8080',
    'instr debug demo --prompt "Once upon a time" --page',
    "instr debug demo --dap-port 4711",
    cls=_Debug,
)
def debug(
    model: str | None = cli.argument(required=False),
    prompt: str | None = cli.option("The prompt; - is not possible here.", "-p --prompt TEXT"),
    n: int = cli.option("Tokens to generate at most.", "-n", default=16),
    breakpoints: tuple[str, ...] = cli.option(
        "A breakpoint, as `help break` describes it; may be repeated.  [default: the first op]",
        "-b --break TEXT",
        multiple=True,
    ),
    log: Path | None = cli.option(
        "The log to write.  [default: debug.log, or debug-2.log and so on if that exists]",
        "FILE",
        cli.PATH,
    ),
    force: bool = cli.FORCE,
    chat: bool = cli.CHAT,
    context: ContextOptions = cli.CONTEXT,
    dap: bool = cli.flag(
        "Speak the Debug Adapter Protocol with an editor over standard input and output."
    ),
    dap_port: int | None = cli.option(
        "The same over TCP, at a port of 127.0.0.1; 0 takes a free one.", "PORT", IntRange(0, 65535)
    ),
    page: bool = cli.flag("Stop, look and change in the browser."),
    serving: cli.Serving = cli.serving_options(" of the page"),
) -> None:
    """
    MODEL is a GGUF file, or demo for the demo model; or give a Python program after --, which runs
    in this process. A compute stops after an op, when its result is there. Commands are read from
    standard input; `help` lists them. The generated text goes to standard output, everything else
    to standard error.

    With --dap or --dap-port an editor gives the commands, and its launch configuration the options.
    With --page a browser gives them, at an address of 127.0.0.1.
    """
    ctx = click.get_current_context()
    program: Sequence[str] | None = ctx.meta["program"]
    for_editor = dap or dap_port is not None
    if not page and cli.given_options("port", "no_browser"):
        raise UsageError("--port and --no-browser are for --page")
    if for_editor:
        for given in cli.given_options():
            if given not in ("--prompt", "--dap", "--dap-port"):
                raise UsageError(f"{given} is not for --dap; the launch configuration has it")
        if program is not None:
            raise UsageError("--dap is for models; leave out the program after --")
        if dap and dap_port is not None:
            raise UsageError("--dap and --dap-port exclude each other")
    elif str(log) == "-":
        raise UsageError("the log must be a file; give --log the name of one")
    elif program is not None and (model is not None or prompt is not None):
        raise UsageError("give a model with --prompt, or a program after --, not both")
    elif program is None and (model is None or prompt is None):
        raise UsageError("give a model and --prompt TEXT, or a program after --")
    from llamacpp_instr.debugger.commands import Terminal
    from llamacpp_instr.run import debugging
    from llamacpp_instr.run.session import RunOptions, default_log

    if for_editor:
        debugging.serve_editor(model, prompt, dap_port)
        return
    log = log or default_log(force, debugging.DEBUG_LOG)
    to = serving.port or 0, serving.show
    if program is None:
        assert model is not None
        assert prompt is not None
        options = RunOptions(model, [prompt], log, n, chat=chat, context=context, force=force)
        if page:
            ctx.exit(debugging.debug_model_on_page(options, breakpoints, *to))
        debugging.debug_model(options, Terminal(breakpoints))
    elif page:
        debugging.debug_program_on_page(program, log, force, breakpoints, *to)
    else:
        debugging.debug_program(program, Terminal(breakpoints), log, force)
