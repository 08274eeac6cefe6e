"""`instr validate MODEL`: checks a model against an independent implementation."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need
from llamacpp_instr.cli.options import ReportOutput, command, report_options, threads_option

_DECODES = 4


@command(
    "instr validate model.gguf",
    'instr validate demo --prompt "Once upon a time" -o checked.html',
    "instr validate llama.gguf --reference Llama-3.2-1B",
)
@click.argument("model")
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.  [default: 32 tokens]")
@click.option(
    "-n",
    type=click.IntRange(0, 1000),
    help=f"Decodes after it, to check ops.  [default: {_DECODES}]",
)
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Compare the states of every layer with transformers, which runs this folder.",
)
@click.option(
    "--bound",
    type=click.FloatRange(0, min_open=True),
    metavar="X",
    help="With --reference: largest relative error that is ok.  [default: by the weights' type]",
)
@threads_option
@click.option(
    "--flash-attn",
    type=click.Choice(["auto", "on", "off"]),
    help="Flash attention.  [default: auto; off with --reference, as it rounds to F16]",
)
@report_options
def validate(
    model: str,
    prompt: str | None,
    n: int | None,
    reference: Path | None,
    bound: float | None,
    threads: int | None,
    flash_attn: str | None,
    output: ReportOutput,
) -> None:
    """Check every op, or every layer, of a model.

    Runs a prefill and some decodes. After each op, ONNX Runtime computes the same from the inputs
    that the op had, with dequantized weights, in float32. The report has the largest error of each
    op beside the tolerance of llama.cpp's own test-backend-ops. It also compares the logits of the
    prompt with those of the whole graph in ONNX Runtime, and the logits of the decodes, which read
    the cache, with one pass over all tokens.

    With --reference it compares a prefill with transformers instead: the embeddings, the hidden
    states after every layer, and the logits of the same tokens. FOLDER is the Hugging Face folder
    that the model was converted from. The report names the first layer where they part. This needs
    the packages of llamacpp-instr[hf], and memory for the weights in float32.

    MODEL is a GGUF file, or demo for the demo model. Exits with status 1 if an error is beyond its
    tolerance.
    """
    from llamacpp_instr.base.terminal import progress_bar
    from llamacpp_instr.llama.engine import ContextOptions
    from llamacpp_instr.llama.log import captured
    from llamacpp_instr.model.file import load_model_file
    from llamacpp_instr.recording.memory.plan import check_memory

    chosen = flash_attn or ("auto" if reference is None else "off")
    options = ContextOptions(threads=threads, flash_attn=chosen)
    options.check()
    if reference is None and bound is not None:
        raise UsageError("--bound is for --reference; the tolerances of ops are upstream's")
    if reference is not None and n is not None:
        raise UsageError("-n is the number of decodes; --reference compares a prefill only")
    need("onnx")  # the tables of --reference are those of the ops
    output.check(model)
    if reference is None:
        from llamacpp_instr.converters.validate.run import judge, validate_model

        file = load_model_file(model)
        check_memory(file, options)
        with captured() as log, progress_bar("Checking") as on_progress:
            n = _DECODES if n is None else n
            verdict = judge(validate_model(file, prompt, n, options, log, on_progress))
    else:
        from llamacpp_instr.converters.validate.against import (
            compare_with_transformers,
            default_bound,
            judge_states,
            open_reference,
        )

        source = open_reference(reference)
        source.check_output(Path(output.path))
        need("hf")
        file = load_model_file(model)
        check_memory(file, options)
        why = "--bound"
        if bound is None:
            bound, type_ = default_bound(file)
            why = f"the bound for weights in {type_}"
        with captured() as log, progress_bar("Comparing") as on_progress:
            found = compare_with_transformers(
                file, source, prompt, threads, chosen, log, on_progress
            )
        verdict = judge_states(found, bound, why)
    output.write(verdict.reports, table=verdict.reports[0])
    if not verdict.passed:
        sys.exit(1)
