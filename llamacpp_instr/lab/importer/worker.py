"""The child process in which llama.cpp's converter runs; `importer.source` starts it.

No code of a model's folder runs in it: neither a pickle's nor a Python file's.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

from llamacpp_instr.base.child import Answer, Request, remove_output, serve
from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.importer.source import LORA_SCRIPT


def run_no_code_of_the_folder() -> None:
    """Make transformers refuse the Python files that a folder may bring, and torch any pickle."""
    import torch
    import transformers.dynamic_module_utils as remote

    def refuse(class_name: str, module_path: str | os.PathLike[str], **_: Any) -> None:
        raise UsageError(
            f"the model needs its own Python code ({class_name} in {Path(module_path).name}), "
            "which instr does not run"
        )

    load = torch.load
    remote.get_class_in_module = refuse
    remote.TIME_OUT_REMOTE_CODE = 0  # it would ask on standard input
    torch.load = lambda *args, **options: load(*args, **{**options, "weights_only": True})


def check_pickles(files: list[Path]) -> None:
    """Raises UsageError for a pickle with more than tensors, which libraries would only refuse."""
    from llamacpp_instr.lab.importer.meta import load_tensors

    for file in files:
        if file.suffix in (".bin", ".pth", ".pt"):
            load_tensors(file)


def main() -> None:
    serve(_convert, remove_output)


def _convert(request: Request, answer: Answer) -> None:
    import torch

    # the converter needs the gguf of the same release
    sys.path[:0] = [request["converter"], str(Path(request["converter"]) / "gguf-py")]
    run_no_code_of_the_folder()
    _report_progress(Path(request["output"]), answer)
    files = [Path(name) for name in request["weights"]]
    with torch.inference_mode():
        if request["kind"] == "LORA":
            check_pickles(files)
            _convert_adapter(request)
        else:
            _convert_model(request, files)


def _report_progress(output: Path, answer: Answer) -> None:
    """Let the converter's progress bar report to the parent, and stop if the disk is too small."""
    import tqdm

    class Bar:
        def __init__(self, *_: object, total: int = 0, **__: object) -> None:
            self.done, self.total = 0, total
            free = shutil.disk_usage(output.parent).free
            if total > free:
                raise UsageError(
                    f"{total:,} bytes are needed in {output.parent}, which has {free:,} left"
                )
            answer("progress", 0, total)

        def update(self, n: int) -> None:
            self.done += n
            answer("progress", self.done, self.total)

    tqdm.tqdm = Bar


def _convert_model(request: Request, files: list[Path]) -> None:
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    folder = Path(request["source"])
    if request["kind"] == "META":
        from llamacpp_instr.lab.importer.meta import MetaModel

        meta = MetaModel(folder, files)
        tensors = meta.tensors()
        folder = Path(request["staging"]) / folder.resolve().name
        folder.mkdir()
        meta.write_config(folder)
        ModelBase.index_tensors = lambda _self, *_, **__: tensors
    else:
        check_pickles(files)
        _order_by_name(ModelBase)
    architecture = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
    try:
        model_class = get_model_class(architecture)
    except NotImplementedError:
        raise UsageError(
            f"{folder}: llama.cpp's converter does not know the architecture {architecture}"
        ) from None
    named = {None: "GUESSED", "F32": "ALL_F32"}
    type_ = gguf.LlamaFileType[named.get(request["type"], f"MOSTLY_{request['type']}")]
    model_class(folder, type_, Path(request["output"])).write()


def _order_by_name(base: Any) -> None:
    """Write the tensors in the order of their names, as in a single file, so that the file does not
    depend on how the source was split."""
    index = base.index_tensors

    def ordered(self: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        return dict(sorted(index(self, *arguments, **options).items()))

    base.index_tensors = ordered


def _convert_adapter(request: Request) -> None:
    """Run the converter's script for adapters, whose class exists only there."""
    script = Path(request["converter"]) / LORA_SCRIPT
    sys.argv = [
        str(script), "--outfile", request["output"], "--outtype",
        (request["type"] or "F32").lower(), "--base", request["base"], request["source"],
    ]  # fmt: skip
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise UsageError(
                f"llama.cpp's converter refused the adapter {request['source']}"
            ) from None
