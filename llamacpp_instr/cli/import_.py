"""`instr import SOURCE -o model.gguf`: imports a model of another format."""

from __future__ import annotations

from pathlib import Path

import click

from llamacpp_instr.cli.options import command, force_option

_TYPES = ("F16", "BF16", "F32", "Q8_0")


@command(
    "instr import Llama-3.2-1B -o llama.gguf",
    "instr import llama-2-7b -o llama.gguf --type Q8_0 --force",
    "instr import adapter -o adapter.gguf --base Llama-3.2-1B",
)
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The GGUF file to write.",
)
@click.option(
    "--type",
    "type_",
    type=click.Choice(_TYPES, case_sensitive=False),
    metavar="TYPE",
    help="Type of the weights: F16, BF16, F32 or Q8_0.  "
    "[default: BF16 if the source has it, else F16; adapters F32]",
)
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="For an adapter: the folder with config.json of its base model.",
)
@force_option
def import_(source: Path, output: Path, type_: str | None, base: Path | None, force: bool) -> None:
    """Convert a model folder to a GGUF model.

    SOURCE is a Hugging Face folder with safetensors or PyTorch files, a folder in Meta's own layout
    (consolidated.*.pth, params.json, tokenizer.model; Llama 1 to 3), or a LoRA adapter of PEFT.
    llama.cpp's own converter does the work, in its own process. It needs the packages of
    llamacpp-instr[hf]. No code of the folder runs, and nothing is downloaded but the converter.
    """
    from llamacpp_instr.base.errors import UsageError
    from llamacpp_instr.base.output import check_model_output
    from llamacpp_instr.base.terminal import notice, progress_bar
    from llamacpp_instr.lab.importer.source import import_model, open_source

    if str(output) == "-":
        raise UsageError("a model is written to a file, not to standard output; name one")
    check_model_output(output, force)
    found = open_source(source, base)
    found.check_output(output)
    with progress_bar(f"Importing {source.name}") as on_progress:
        model = import_model(found, output, type_, force=force, on_progress=on_progress)
    if model is None:
        notice(f"{output}: a LoRA adapter, {output.stat().st_size:,} bytes")
        return
    architecture = model.metadata.get("general.architecture")
    notice(f"{output}: {architecture}, {len(model.weights)} tensors, {model.n_bytes:,} bytes")
