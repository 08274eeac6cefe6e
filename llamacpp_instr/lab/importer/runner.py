"""Imports a model: starts llama.cpp's converter in a child process and follows it.

Invariant: what can be seen to be wrong is refused before the child starts, and the file gets its
name once it is complete. Nothing that happens to the child ends this process.
"""

from __future__ import annotations

import errno
from pathlib import Path

from llamacpp_instr.base.child import Child, ChildDied, ChildFailed
from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.output import check_model_output, new_model
from llamacpp_instr.base.system import need, temporary_directory
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.lab.importer.converter import find_converter
from llamacpp_instr.lab.importer.source import Kind, Source
from llamacpp_instr.llama.build.cache import own_cache
from llamacpp_instr.model.file import ModelFile, load_model_file


def import_model(
    source: Source,
    output: Path,
    type_: str | None = None,
    *,
    force: bool = False,
    on_progress: OnProgress = lambda _done, _total: None,
) -> ModelFile | None:
    """Write the model or adapter of `source` to `output`; returns the model, None for an adapter.

    `type_` is F16, BF16, F32 or Q8_0; None means BF16 if the weights are BF16, else F16, and for
    an adapter F32. `on_progress` gets bytes. Raises UsageError for what cannot be imported,
    BuildError if the converter cannot be fetched, InstrError if it fails.
    """
    need("hf")
    check_model_output(output, force)
    converter = find_converter()
    with new_model(output, force) as temporary, temporary_directory("instr-import-") as staging:
        request = {
            "kind": source.kind.name,
            "source": str(source.path),
            "weights": [str(file) for file in source.weights],
            "base": str(source.base),
            "type": type_,
            "output": str(temporary),
            "staging": str(staging),
            "converter": str(converter),
        }
        log = own_cache() / "logs" / f"import-{source.path.resolve().name}.log"
        try:
            with Child(f"{__package__}.worker", log) as child:
                child.ask(request, on_progress)
        except ChildFailed as failed:
            raise _failure(source, log, failed) from None
        except ChildDied as died:
            raise InstrError(
                f"{source.path}: llama.cpp's converter died {died}; its log is {log}"
            ) from None
        if source.kind is Kind.LORA:
            return None
        try:
            return load_model_file(temporary)
        except UsageError as error:
            raise InstrError(f"llama.cpp's converter wrote an incomplete model: {error}") from None


def _failure(source: Source, log: Path, failed: ChildFailed) -> InstrError:
    """The error for an exception of the converter: nearly always the folder is the cause."""
    if failed.number == errno.ENOSPC:
        return InstrError(f"{source.path}: the disk is full")
    if "pre-tokenizer was not recognized" in failed.text:
        return UsageError(
            f"{source.path}: llama.cpp's converter does not know this tokenizer (its BPE "
            "pre-tokenizer has an unknown hash)"
        )
    return UsageError(f"{source.path} cannot be imported: {failed}; the converter's log is {log}")
