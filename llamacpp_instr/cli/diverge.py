"""`instr diverge A B`: where two models part, and which weights cause it."""

from __future__ import annotations

import math

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli.options import (
    MOST_TOKENS,
    ReportOutput,
    command,
    read_text,
    report_options,
    threads_option,
)


@command(
    "instr diverge model-F16.gguf model-Q4_K_M.gguf",
    "instr diverge model-F16.gguf model-Q4_K_M.gguf --tokens 64 --why -o diverge.html",
)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--text", metavar="FILE", help="Text to compute; - is standard input.  "
              "[default: A writes it]")  # fmt: skip
@click.option(
    "--tokens",
    type=click.IntRange(1, MOST_TOKENS),
    default=512,
    show_default=True,
    help="Tokens at most.",
)
@click.option(
    "--ctx",
    type=click.IntRange(2, MOST_TOKENS),
    metavar="TOKENS",
    help="Length of a chunk.  [default: 512 of a text; an eighth of the tokens if A writes them]",
)
@click.option(
    "--bound",
    type=float,
    default=0.01,
    show_default=True,
    help="Name the first op whose relative error is larger.",
)
@click.option(
    "--memory",
    type=click.IntRange(1, 1 << 30),
    default=512,
    show_default=True,
    metavar="MIB",
    help="Memory for values of ops, beside what both models take.",
)
@click.option("--why", is_flag=True, help="Exchange weights, to find their shares in the KL "
              "divergence.")  # fmt: skip
@threads_option
@report_options
def diverge(
    a: str,
    b: str,
    text: str | None,
    tokens: int,
    ctx: int | None,
    bound: float,
    memory: int,
    why: bool,
    threads: int | None,
    output: ReportOutput,
) -> None:
    """Find where two models part, op by op, and why.

    Runs both models on the same tokens. Reports the error of every tensor of B against A: along the
    layers, the first op beyond --bound, the ops that add the most error because they read a weight
    that differs, outlier channels, and the positions that suffer. JSON, HTML and CSV have every
    tensor.

    --why lists the weights instead of the ops: it exchanges weights of A with those of B, by groups
    and then one by one, and measures the KL divergence of each. This takes about two passes over
    the tokens for each layer, and more for its weights.

    A and B are GGUF files with the same architecture and vocabulary, or demo for the demo model.
    """
    from llamacpp_instr.base.terminal import progress_bar
    from llamacpp_instr.diverge.report import all_tensors, divergence_charts, divergence_reports
    from llamacpp_instr.diverge.run import DivergeOptions, compare_models
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.recording.memory.plan import check_memory

    if not (math.isfinite(bound) and bound >= 0):
        raise UsageError(f"--bound is {bound:g}; it must be 0 or larger")
    output.check(a, b, text)
    one, other = load_model_file(a), load_model_file(b)
    for file in (one, other):
        check_memory(file, ContextOptions(ctx=ctx, threads=threads))
    read = None if text is None else read_text(text)
    options = DivergeOptions(tokens, ctx, memory * 2**20, threads)
    with progress_bar("Comparing") as on_progress, progress_bar("Exchanging") as on_exchange:
        found = compare_models(one, other, read, options, why, on_progress, on_exchange)
    reports = divergence_reports(
        found, one.path, other.path, bound, every_row=output.form in ("json", "html")
    )
    output.write(
        reports,
        table=all_tensors(found.errors),
        charts=divergence_charts(found) if output.form == "html" else [],
        title=f"{other.path.name} against {one.path.name}",
    )
