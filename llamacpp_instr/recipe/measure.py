"""The bytes, the error and the effect on the output of each tensor, in each type that it can have.

The error of a tensor in a type is the sum of the squared differences of its elements, each weighted
by the importance of its column if there is an importance matrix. In a large matrix, a sample of the
rows is measured. The effect of a group of tensors is the KL divergence between the unchanged model
and one in which only this group has the types of PROBE. The KL divergence grows with the square of
small errors, so a tensor's share of its group's effect is its share of the group's error, and in
another type its effect is larger or smaller in proportion to its error there.

Each figure is kept in a file as soon as it is measured. Another run for the same model, text,
importance matrix and library finds it there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.machine import usable_cpus
from llamacpp_instr.base.output import open_output
from llamacpp_instr.base.system import cache_dir, temporary_directory
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.diverge.run import DivergeOptions, Pair
from llamacpp_instr.lab.quality.divergence import CacheTypes
from llamacpp_instr.lab.quality.logits import (
    DEFAULT_CTX,
    OutputOptions,
    WritingContext,
    check_comparison,
    compare_outputs,
    cut_chunks,
    opened_models,
    write_chunks,
)
from llamacpp_instr.lab.quantize.plan import QuantizationPlan, QuantizeOptions
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.lab.weights.measure import Job, WeightReader, work
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.llama.generate import tokenize
from llamacpp_instr.llama.native import load
from llamacpp_instr.model.file import ModelFile, Weight, load_model_file
from llamacpp_instr.model.types import BY_NAME, GgmlType
from llamacpp_instr.recipe.thin import write_thinned

PURE = ("Q2_K", "Q3_K_S", "IQ4_XS", "Q4_K_S", "Q5_K_S", "Q6_K", "Q8_0")
"""file types; a tensor can have the main type of each, or the type that replaces it"""
PROBE = "Q4_K_S"
"""in the middle of them: effects are small enough to add up, and are not lost in rounding"""
MOST_GROUPS = 26
"""Each takes a run over the text, and these runs take most of the time: a recipe may take 40 times
as long as llama-perplexity."""
DEFAULT_CHUNKS = 8

_STATE = 2
"""version of the file of figures"""


class Tensor(msgspec.Struct, frozen=True):
    """A tensor in one of the types that it can have."""

    type: str
    error: float


class Figures(msgspec.Struct):
    """What was measured."""

    tensors: dict[str, dict[str, Tensor]] = {}
    """by file type of PURE, by tensor"""
    read: list[str] = []
    """the tensors that a graph reads; others have no effect"""
    effects: dict[str, float] = {}
    """by group, in nats; of all tensors together under ALL"""
    caches: dict[str, float] = {}
    """the KL divergence of each cache from an f16 cache, in nats, by its name"""


ALL = "all"


@dataclass(frozen=True)
class Calibration:
    """The text, and how it is computed."""

    text: str | None
    """None: the model writes it"""
    ctx: int = DEFAULT_CTX
    """tokens of a chunk"""
    chunks: int = DEFAULT_CHUNKS
    threads: int | None = None
    seed: int = 1
    """of the text that the model writes"""


@dataclass(frozen=True)
class Choice:
    """A type that a tensor can have."""

    type: GgmlType
    n_bytes: int
    kl: float
    """predicted, in nats"""
    ns: float = 0.0
    """predicted, of a decode"""
    error: float = 0.0
    """the weighted sum of the squared differences"""


@dataclass
class Measured:
    """The choices of each tensor that can be quantized, including the type that it has."""

    source: ModelFile
    choices: dict[str, list[Choice]]
    """by tensor, the smallest first"""
    groups: dict[str, tuple[str, ...]]
    effects: dict[str, float]
    """by group, in nats"""
    whole: float
    """in nats, with all groups at once"""
    plans: list[QuantizationPlan] = field(default_factory=list)
    """of PURE"""

    def with_times(self, times: Mapping[str, Mapping[str, float]]) -> Measured:
        """A copy with the time of each tensor in each type, ns; 0 for one that no product reads."""
        choices = {
            name: [replace(of, ns=times.get(name, {}).get(of.type.name, 0.0)) for of in choices]
            for name, choices in self.choices.items()
        }
        return replace(self, choices=choices)


def group_tensors(tensors: Sequence[Weight], most: int = MOST_GROUPS) -> dict[str, tuple[str, ...]]:
    """The names of tensors by group, in the order of the file: a role in neighbouring layers, or a
    tensor outside of layers. There are at most `most` groups, unless there are more roles."""
    roles = {weight.role for weight in tensors if weight.layer >= 0}
    alone = sum(weight.layer < 0 for weight in tensors)
    n_layers = 1 + max((weight.layer for weight in tensors), default=0)
    bands = max(min((most - alone) // max(len(roles), 1), n_layers), 1)
    found: dict[str, list[str]] = {}
    for weight in tensors:
        key = weight.role
        if weight.layer >= 0:
            band = weight.layer * bands // n_layers
            first, end = (-(-i * n_layers // bands) for i in (band, band + 1))
            key += f" {first}-{end - 1}" if end - first > 1 else f" {first}"
        found.setdefault(key, []).append(weight.name)
    return {key: tuple(names) for key, names in found.items()}


def measure(
    source: ModelFile,
    options: QuantizeOptions,
    calibration: Calibration,
    on_errors: OnProgress = lambda *_: None,
    on_effects: OnProgress = lambda *_: None,
) -> Measured:
    """The choices of each tensor. `options` are those of the quantizer; `on_errors` gets the types
    measured and their total, `on_effects` the groups and theirs. Raises `UsageError` for a model or
    a text that cannot be used, `InstrError` if llama.cpp fails."""
    check_comparison([source], OutputOptions(chunks=calibration.chunks))
    with ExitStack() as stack:
        quantizer = stack.enter_context(Quantizer(source, replace(options, pure=True)))
        plans = [quantizer.plan(name) for name in PURE]
        path = _state_path(source, options, calibration)
        figures = _read_state(path)
        folder = stack.enter_context(temporary_directory("instr-recipe-"))
        _measure_errors(quantizer, figures, path, folder, on_errors)
        probe = plans[PURE.index(PROBE)]
        changed = [of.weight for of in probe.tensors if of.type != of.weight.type]
        if not changed:
            raise UsageError(f"{source.path} has no tensor that can be quantized")
        if ALL not in figures.effects or _missing(changed, figures):
            candidate = folder / "probe.gguf"
            quantizer.write([probe], [candidate])
            with _mixtures(source, load_model_file(candidate), calibration) as (read, effect_of):
                figures.read = [weight.name for weight in changed if weight.name in read]
                missing = {ALL: tuple(figures.read)} if ALL not in figures.effects else {}
                missing |= _missing(changed, figures)
                for done, (key, names) in enumerate(missing.items()):
                    on_effects(done, len(missing))
                    figures.effects[key] = max(effect_of(names), 0.0)
                    _write_state(path, figures)
    return _measured(source, plans, _groups(changed, figures), figures)


def measure_caches(
    source: ModelFile,
    options: QuantizeOptions,
    calibration: Calibration,
    caches: Sequence[CacheTypes],
    on_progress: OnProgress = lambda *_: None,
) -> dict[CacheTypes, float]:
    """The KL divergence, in nats, of the model with each cache from the model with an f16 cache.
    Raises like `compare_outputs`."""
    path = _state_path(source, options, calibration)
    figures = _read_state(path)
    missing = [of for of in caches if of != CacheTypes() and of.name not in figures.caches]
    if missing:
        chunks = cut_calibration(source, calibration)
        how = OutputOptions(ctx=calibration.ctx, threads=calibration.threads, costs=False)
        files, types = [source] * (1 + len(missing)), [CacheTypes(), *missing]
        outputs = compare_outputs(files, chunks, how, on_progress, types)
        for of, divergence in zip(missing, outputs.divergences, strict=True):
            figures.caches[of.name] = max(divergence.kl.value, 0.0)
        _write_state(path, figures)
    return {of: figures.caches.get(of.name, 0.0) for of in caches}


def _groups(changed: Sequence[Weight], figures: Figures) -> dict[str, tuple[str, ...]]:
    read = set(figures.read)
    return group_tensors([weight for weight in changed if weight.name in read])


def _missing(changed: Sequence[Weight], figures: Figures) -> dict[str, tuple[str, ...]]:
    """The groups whose effect is not measured yet."""
    groups = _groups(changed, figures)
    return {key: names for key, names in groups.items() if key not in figures.effects}


def _measured(
    source: ModelFile,
    plans: list[QuantizationPlan],
    groups: dict[str, tuple[str, ...]],
    figures: Figures,
) -> Measured:
    choices: dict[str, list[Choice]] = {}
    at_probe = figures.tensors[PROBE]
    for key, names in groups.items():
        error = sum(at_probe[name].error for name in names)
        per_error = figures.effects[key] / error if error > 0 else 0.0
        for name in names:
            weight = source.by_name[name]
            found = {weight.type.name: Choice(weight.type, weight.n_bytes, 0.0)}
            for of_type in figures.tensors.values():
                tensor = of_type[name]
                type_ = BY_NAME[tensor.type]
                n_bytes = type_.row_bytes(weight.row_length) * weight.n_rows
                choice = Choice(type_, n_bytes, per_error * tensor.error, error=tensor.error)
                found.setdefault(tensor.type, choice)
            choices[name] = sorted(found.values(), key=lambda of: (of.n_bytes, of.kl))
    effects = {key: figures.effects[key] for key in groups}
    return Measured(source, choices, groups, effects, figures.effects[ALL], plans)


# --- errors ---


def _measure_errors(
    whole: Quantizer, figures: Figures, path: Path, folder: Path, on_progress: OnProgress
) -> None:
    missing = [name for name in PURE if name not in figures.tensors]
    if not missing:
        return
    importances = whole.imatrix.entries if whole.imatrix else {}
    thin = write_thinned(whole.source, folder / "thin")
    with Quantizer(thin, whole.options) as quantizer:
        for done, name in enumerate(missing):
            on_progress(done, len(missing))
            plan, candidate = quantizer.plan(name), folder / "candidate.gguf"
            quantizer.write([plan], [candidate], force=True)
            errors = weighted_errors(thin, load_model_file(candidate), importances)
            figures.tensors[name] = {
                of.name: Tensor(of.type.name, errors[of.name] * times)
                for of in plan.tensors
                if of.name in errors
                for times in [whole.source.by_name[of.name].n_rows / of.weight.n_rows]
            }
            _write_state(path, figures)


def weighted_errors(
    reference: ModelFile, candidate: ModelFile, importances: dict[str, NDArray[np.float32]]
) -> dict[str, float]:
    """For each tensor that has another type in the candidate: the sum of the squared differences of
    the elements, each multiplied by the importance of its column, or by 1 if the tensor has none.
    Importances are one value per column, one expert after the other."""
    readers = WeightReader(reference), WeightReader(candidate)
    pairs = [
        (weight, candidate.by_name[weight.name])
        for weight in reference.weights
        if candidate.by_name[weight.name].type != weight.type
    ]
    for reader, side in zip(readers, zip(*pairs, strict=True), strict=False):
        for weight in side:
            reader.check(weight)

    def error(one: Weight, other: Weight, matrix: int) -> float:
        columns = one.row_length
        rows = one.n_rows // n_matrices(one)
        values = importances.get(one.name)
        weights = None if values is None else values.reshape(-1, columns)
        at_once = max(_AT_ONCE // columns, 1)
        found = 0.0
        for row in range(matrix * rows, (matrix + 1) * rows, at_once):
            end = min(row + at_once, (matrix + 1) * rows)
            a, b = (
                reader.read(of, row, end, 0, columns)
                for reader, of in zip(readers, (one, other), strict=True)
            )
            squares = np.einsum("ij,ij->j", a - b, a - b)
            of_matrix = 1.0 if weights is None else weights[matrix % len(weights)]
            found += float(np.sum(squares * of_matrix, dtype=np.float64))
        return found

    jobs = [
        Job(one.n_bytes, [partial(error, one, other, i) for i in range(n_matrices(one))], sum)
        for one, other in pairs
    ]
    return dict(zip((one.name for one, _ in pairs), work(jobs, usable_cpus()), strict=True))


_AT_ONCE = 1 << 20
"""elements"""


def n_matrices(weight: Weight) -> int:
    """How many matrices a tensor has: one for each expert."""
    return int(np.prod(weight.ne[2:])) if len(weight.ne) > 2 else 1


# --- effects ---


@contextmanager
def _mixtures(
    source: ModelFile, probe: ModelFile, calibration: Calibration
) -> Iterator[tuple[set[str], Callable[[Collection[str]], float]]]:
    """The tensors that the graph reads; and a function that measures the KL divergence, in nats,
    with some of the probe's tensors."""
    chunks = cut_calibration(source, calibration)
    options = DivergeOptions(threads=calibration.threads)
    with opened_models([source, probe]) as (models, _):
        # two tokens show where the weights are
        found, pair = Pair(models, [chunks[0][:2]], options), Pair(models, chunks, options)
        found.compare(lambda *_: None)
        pair.comparison.weights = found.comparison.weights
        with pair.mixtures() as kl_of:
            yield {weight.name for weight in pair.comparison.weights}, kl_of


def cut_calibration(source: ModelFile, calibration: Calibration) -> list[list[int]]:
    """Chunks of a text, or of one that the model writes."""
    read = None
    if calibration.text is not None:
        [read] = tokenize(source.path, [calibration.text], parse_special=False)
    options = ContextOptions(ctx=calibration.ctx, threads=calibration.threads)
    with opened_models([source]) as ([model], _):
        if read is not None:
            return cut_chunks(model, read, calibration.ctx, calibration.chunks)
        with WritingContext(model, options) as writer:
            n, seed = calibration.chunks, calibration.seed
            return list(write_chunks(writer, n, seed, lambda _n: None))


# --- what is kept ---


def _state_path(source: ModelFile, options: QuantizeOptions, calibration: Calibration) -> Path:
    """The file of the figures of this model, text, importance matrix and library."""
    found = hashlib.sha256()
    files = [*source.headers, *([options.imatrix] if options.imatrix else []), load().path]
    for path in files:
        status = path.stat()
        found.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    text = calibration.text, calibration.ctx, calibration.chunks, calibration.seed
    found.update(repr((_STATE, PURE, PROBE, MOST_GROUPS, text)).encode())
    return cache_dir() / "recipes" / f"{found.hexdigest()[:32]}.json"


def _read_state(path: Path) -> Figures:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Figures)
    except (OSError, msgspec.DecodeError):
        return Figures()


def _write_state(path: Path, figures: Figures) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_output(path, force=True) as file:
        file.write(msgspec.json.encode(figures))
