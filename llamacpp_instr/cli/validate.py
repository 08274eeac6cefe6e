"""`instr validate MODEL`: checks every op against an independent implementation."""

from __future__ import annotations

import sys

import click

from llamacpp_instr.cli.report_output import ReportOutput, report_options
from llamacpp_instr.errors import UsageError


@click.command(
    "validate",
    epilog="\b\nExamples:\n  instr validate model.gguf\n"
    '  instr validate demo --prompt "Once upon a time" -o checked.html',
)
@click.argument("model")
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.  [default: 32 tokens]")
@click.option(
    "-n", default=4, show_default=True, type=click.IntRange(0, 1000), help="Decodes after it."
)
@click.option("--threads", type=int, help="Threads.  [default: physical cores]")
@click.option(
    "--flash-attn",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "on", "off"]),
    help="Flash attention.",
)
@report_options
def validate(
    model: str,
    prompt: str | None,
    n: int,
    threads: int | None,
    flash_attn: str,
    output: ReportOutput,
) -> None:
    """Check every op of a model against ONNX Runtime.

    Runs a prefill and some decodes. After each op, ONNX Runtime computes the same from the inputs
    that the op had, with dequantized weights, in float32. The report has the largest error of each
    op beside the tolerance of llama.cpp's own test-backend-ops. It also compares the logits of the
    prompt with those of the whole graph in ONNX Runtime, and the logits of the decodes, which read
    the cache, with one pass over all tokens.

    MODEL is a GGUF file, or demo for the demo model. Exits with status 1 if an error is beyond its
    tolerance.
    """
    _check_packages()
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.llama.log import captured
    from llamacpp_instr.memory.plan import check_memory
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.progress import progress_bar
    from llamacpp_instr.validate.report import judge
    from llamacpp_instr.validate.run import validate_model

    output.check(model)
    options = ContextOptions(threads=threads, flash_attn=flash_attn)
    options.check()
    file = load_model_file(model)
    check_memory(file, options)
    with captured() as log, progress_bar("Checking") as on_progress:
        found = validate_model(file, prompt, n, options, log, on_progress)
    verdict = judge(found)
    output.write(verdict.reports, table=verdict.reports[0])
    if not verdict.passed:
        sys.exit(1)


def _check_packages() -> None:
    from importlib.util import find_spec

    if missing := [name for name in ("onnx", "onnxruntime") if find_spec(name) is None]:
        raise UsageError(f'this needs {" and ".join(missing)}: pip install "llamacpp-instr[onnx]"')
