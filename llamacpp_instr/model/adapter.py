"""A LoRA adapter as a file: what it changes, and whether it fits a model.

Invariant: everything comes from the headers. What llama.cpp would refuse, and what would make ggml
end the process, is refused first. The rules are those of `llama_adapter_lora_init_impl` in
src/llama-adapter.cpp and of `build_lora_mm` and `build_inp_embd` in src/llama-graph.cpp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.model.file import ModelFile, Weight, find_obstacles, kind_of, load_any_file
from llamacpp_instr.model.header import quoted

ALPHA = "adapter.lora.alpha"
_A, _B = "lora_a", "lora_b"


@dataclass(frozen=True)
class Adapter:
    """An adapter that a run uses, and the factor for what it adds."""

    path: Path
    scale: float = 1.0


def parse_adapter(text: str) -> Adapter:
    """The adapter of `FILE` or `FILE:SCALE`. Raises UsageError for a scale that is not finite."""
    name, colon, last = text.rpartition(":")
    try:
        scale = float(last)
    except ValueError:
        return Adapter(Path(text))
    if not colon or Path(text).exists():
        return Adapter(Path(text))
    if not math.isfinite(scale):
        raise UsageError(f"--lora {text}: the scale must be a finite number")
    return Adapter(Path(name), scale)


def changed_weights(file: ModelFile) -> dict[str, dict[str, Weight]]:
    """The matrices `lora_a` and `lora_b` of an adapter, by the weight that they change."""
    found: dict[str, dict[str, Weight]] = {}
    for weight in file.weights:
        changed, _, matrix = weight.name.rpartition(".")
        if matrix in (_A, _B):
            found.setdefault(changed, {})[matrix] = weight
    return found


def ranks_of(file: ModelFile) -> list[int]:
    """The ranks of an adapter's pairs, ascending."""
    return sorted({of[_B].row_length for of in changed_weights(file).values() if _B in of})


def check_adapter(path: Path, model: ModelFile) -> None:
    """Raise `UsageError` unless the file is a LoRA adapter that llama.cpp can use with `model`."""
    file = load_any_file(path)
    header = file.headers[path]
    if (kind := kind_of(header)) != "adapter":
        raise UsageError(f"{path} is not a LoRA adapter: its general.type is {quoted(kind)}")
    for problem in (*find_obstacles(header), *_problems(file)):
        raise UsageError(f"{path}: {problem}")
    if file.architecture != model.architecture:
        raise UsageError(
            f"{path} is an adapter for the architecture {quoted(file.architecture)}; {model.path} "
            f"is {quoted(model.architecture)}"
        )
    for changed, matrices in changed_weights(file).items():
        if misfit := _misfit(changed, matrices, model):
            raise UsageError(f"{path} does not fit {model.path}: {misfit}")


def _problems(file: ModelFile) -> list[str]:
    found = []
    if (kind := file.metadata.get("adapter.type")) != "lora":
        found.append(f"its adapter.type is {quoted(kind)}; llama.cpp knows only 'lora'")
    if not isinstance(alpha := file.metadata.get(ALPHA, 0.0), float):
        found.append(f"its {ALPHA} is {quoted(alpha)}, not a 32-bit float")
    if len(file.headers) > 1:
        found.append("llama.cpp loads an adapter from one file only; merge its parts")
    for weight in file.weights:
        # llama.cpp leaves out norms
        if not weight.name.endswith((f".{_A}", f".{_B}", "_norm.weight")):
            found.append(f"tensor {weight.name!r} is neither a lora_a nor a lora_b")
    return found


def _misfit(changed: str, matrices: dict[str, Weight], model: ModelFile) -> str | None:
    """Why the pair of matrices cannot change this weight of the model."""
    weight = model.by_name.get(changed)
    if weight is None:
        return f"the model has no tensor {changed!r}"
    if len(matrices) < 2:
        return f"{changed!r} has only a {next(iter(matrices))}"
    n_in, n_out, *more = _padded(weight)
    rank = matrices[_B].row_length
    expected = {_A: (n_in, rank, *more), _B: (rank, n_out, *more)}
    if changed == "token_embd.weight":  # llama.cpp looks up rows of A
        expected = {_A: (rank, n_out, *more), _B: (rank, n_in, *more)}
        if "output.weight" not in model.by_name:
            return f"{changed!r} is also the output of the model, which llama.cpp cannot change"
    for name, ne in expected.items():
        if (has := _padded(matrices[name])) != ne:
            return f"{matrices[name].name!r} is {_shape(has)}; it must be {_shape(ne)}"
    if weight.type.name == "NVFP4":
        return f"{changed!r} has the type NVFP4, to which llama.cpp applies no adapter"
    return None


def _padded(weight: Weight) -> tuple[int, ...]:
    return (*weight.ne, 1, 1, 1, 1)[:4]


def _shape(ne: tuple[int, ...]) -> str:
    while len(ne) > 2 and ne[-1] == 1:
        ne = ne[:-1]
    return " x ".join(map(str, ne))
