"""The states of a model as transformers computes them, in a child process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llamacpp_instr.base.child import Child, ChildDied, ChildFailed
from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.validate.against.compare import Array
from llamacpp_instr.lab.importer.source import Kind, Source, open_source
from llamacpp_instr.llama.build.wheel import own_cache


@dataclass(frozen=True)
class Sizes:
    """What both models must agree on."""

    path: str
    """of the GGUF file, for messages"""
    n_layers: int
    width: int
    """of the hidden states"""
    n_vocab: int


def open_reference(folder: Path) -> Source:
    """The Hugging Face model in a folder. Raises UsageError if there is none, if files are
    missing."""
    source = open_source(folder)
    if source.kind is not Kind.HUGGING_FACE:
        raise UsageError(f"{folder} is {source.kind.value}; --reference needs a Hugging Face model")
    return source


def transformers_states(
    source: Source,
    sizes: Sizes,
    tokens: Sequence[int],
    threads: int | None,
    on_progress: OnProgress,
) -> dict[str, Array]:
    """(tokens, width) by state: of the weights of the folder in float32.

    `on_progress` gets layers done and in total, once the weights are loaded. Raises UsageError if
    the sizes differ, or if transformers cannot load the folder; InstrError if it dies.
    """
    log = own_cache() / "logs" / f"against-{source.path.resolve().name}.log"
    with temporary_directory("instr-against-") as staging:
        request = {
            "folder": str(source.path),
            "weights": [str(file) for file in source.weights],
            "sizes": asdict(sizes),
            "tokens": list(tokens),
            "threads": threads,
            "staging": str(staging),
        }
        try:
            with Child(f"{__package__}.worker", log) as child:
                names: list[str] = child.ask(request, on_progress)
        except ChildFailed as failed:
            if "trust_remote_code" in failed.text:
                raise UsageError(
                    f"{source.path}: the model needs its own Python code, which instr does not run"
                ) from None
            raise UsageError(
                f"{source.path}: transformers cannot run it: {failed}; its log is {log}"
            ) from None
        except ChildDied as died:
            raise InstrError(f"{source.path}: transformers died {died}; its log is {log}") from None
        return {name: np.load(staging / f"{name}.npy", allow_pickle=False) for name in names}
