"""What `instr recipe` does: compares llama.cpp's types, finds a mixture within bounds, or makes a
model again from a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.output import open_output
from llamacpp_instr.base.system import need, temporary_directory
from llamacpp_instr.base.terminal import notice, progress_bar
from llamacpp_instr.lab.quality.caches import plan_caches
from llamacpp_instr.lab.quality.divergence import CacheTypes, Estimate
from llamacpp_instr.lab.quantize.plan import QuantizationPlan, QuantizeOptions
from llamacpp_instr.lab.quantize.runner import Quantizer, doubts
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.recipe.choose import Bounds, Chosen, choose, nearest
from llamacpp_instr.recipe.make import (
    VERSION,
    Recipe,
    planned,
    recipe_json,
    tensor_type_file,
)
from llamacpp_instr.recipe.measure import Calibration, Measured, measure, measure_caches
from llamacpp_instr.recipe.speed import Machine, context_memory, predict_decode, tensor_times
from llamacpp_instr.recipe.verify import (
    F16,
    STANDARD,
    Verified,
    neighbours,
    quantized,
    verify,
)

_PADDING = 32
"""bytes: GGUF aligns tensors to them"""


@dataclass(frozen=True)
class Found:
    """Models beside the one that they were made from."""

    models: list[Verified]
    perplexity: Estimate
    """of the original"""
    measured: Measured | None = None
    gap: float = 0.0
    """how many nats less another mixture can have at most"""
    caches: Sequence[TriedCache] = ()
    """the chosen one first"""


@dataclass(frozen=True)
class TriedCache:
    """A cache with the best mixture beside it."""

    types: CacheTypes
    n_bytes: int
    """0 if f16 is the only cache"""
    kl: float
    """of the cache alone, in nats"""
    recipe: Recipe | None
    """None if no mixture is within the limits"""
    weights: float = 0.0
    """the predicted KL divergence of the mixture, in nats"""
    gap: float = 0.0

    @property
    def total(self) -> float:
        """The predicted KL divergence of both together, in nats."""
        return self.kl + self.weights if self.recipe is not None else float("inf")


@dataclass(frozen=True)
class Limits:
    """What the model may take; None: no limit. At least one is given."""

    size: int | None = None
    """bytes of the file"""
    bpw: float | None = None
    """bits per weight"""
    memory: int | None = None
    """bytes of a context of `ctx` tokens, with the weights"""
    ctx: int | None = None
    speed: float | None = None
    """decoded tokens per second, at least; `machine` predicts them"""
    machine: Machine | None = None
    cache: CacheTypes = F16
    """of that context"""

    def file_bytes(self, plan: QuantizationPlan) -> int | None:
        """Bytes of the file that `size` and `bpw` allow; its header is that of the plan."""
        of_bits = None
        if self.bpw is not None:
            of_bits = plan.header_bytes + int(self.bpw * plan.n_elements / 8)
        return min((of for of in (self.size, of_bits) if of is not None), default=None)


def options_for(source: ModelFile, imatrix: Path | None, threads: int | None) -> QuantizeOptions:
    """The quantizer's options. Prints a notice if the model is already quantized."""
    again = [weight for weight in source.weights if weight.type.is_quantized]
    if again:
        notice(
            f"{source.path} is already quantized ({again[0].name} is {again[0].type}): errors add"
            " up, and all figures are against this file, not against what it was made from"
        )
    return QuantizeOptions(imatrix=imatrix, allow_requantize=bool(again), threads=threads or 0)


def compare_types(source: ModelFile, options: QuantizeOptions, text: Calibration) -> Found:
    """llama.cpp's own types of a model, verified on the text."""
    with Quantizer(source, options) as quantizer:
        plans = standard_plans(quantizer)
        return Found(*_verified(quantizer, plans, text, {}))


def standard_plans(quantizer: Quantizer) -> list[QuantizationPlan]:
    """The plans of STANDARD; without those that need an importance matrix if there is none."""
    plans = [quantizer.plan(name) for name in STANDARD]
    if quantizer.imatrix:
        for doubt in doubts(plans, quantizer.imatrix):
            notice(f"{quantizer.imatrix.path}: {doubt}")
    return [plan for plan in plans if quantizer.imatrix or not plan.needs_imatrix]


def beside(output: Path) -> list[Path]:
    """The files that say how to make the model again: its types, and the recipe."""
    return [output.with_suffix(suffix) for suffix in (".types.txt", ".json")]


def find_recipe(
    source: ModelFile,
    options: QuantizeOptions,
    texts: tuple[Calibration, Calibration],
    limits: Limits,
    output: Path,
    force: bool,
    caches: Sequence[CacheTypes] = (F16,),
) -> Found:
    """The mixture within the limits with the least predicted KL divergence, together with one of
    the caches. It is written to `output`, next to the files that say how to make it, and verified
    on the second text. Raises `UsageError` if nothing is within the limits."""
    need("schedule")  # before hours of measuring
    with (
        progress_bar(f"Measuring errors of {source.path.name}") as on_errors,
        progress_bar("Measuring effects on the output") as on_effects,
    ):
        measured = measure(source, options, texts[0], on_errors, on_effects)
    with Quantizer(source, options) as plain:
        plans = standard_plans(plain)
        with progress_bar("Measuring types of the cache") as on_progress:
            kl_of_cache = measure_caches(source, options, texts[0], caches, on_progress)
        tried = try_caches(measured, plans, options, limits, kl_of_cache)
        recipe, cache = tried[0].recipe, tried[0].types
        assert recipe is not None
        plan = make_again(source, recipe, options, output, force)
        types = {name: BY_NAME[of] for name, of in recipe.tensors.items()}
        handed = zip(beside(output), (tensor_type_file(types), recipe_json(recipe)), strict=True)
        for path, content in handed:
            with open_output(path, force) as file:
                file.write(content)
        others = neighbours(plans, plan.file_bytes)
        made = {output.stem: (load_model_file(output), plan)}
        models, perplexity = _verified(plain, others, texts[1], made, cache)
    predicted = [predicted_kl(measured, of.plan) for of in models]
    models = [
        replace(of, predicted=None if kl is None else kl + kl_of_cache[cache])
        for of, kl in zip(models, predicted, strict=True)
    ]
    return Found(models, perplexity, measured, tried[0].gap, tried)


def try_caches(
    measured: Measured,
    plans: Sequence[QuantizationPlan],
    options: QuantizeOptions,
    limits: Limits,
    kl_of_cache: Mapping[CacheTypes, float],
) -> list[TriedCache]:
    """The best mixture beside each cache, the least predicted KL divergence first. A smaller cache
    leaves more memory for the weights. Raises `UsageError` like `choose_types` if nothing is within
    the limits."""
    caches, sizes = list(kl_of_cache), [0]
    if caches != [F16]:
        files = [measured.source] * (1 + len(caches))
        sizes = plan_caches(files, [F16, *caches], limits.ctx)[1:]
    tried, refused = [], None
    for types, n_bytes in zip(caches, sizes, strict=True):
        kl = kl_of_cache[types]
        try:
            recipe, gap = choose_types(measured, plans, options, replace(limits, cache=types))
        except UsageError as error:
            refused = error
            tried.append(TriedCache(types, n_bytes, kl, None))
            continue
        recipe.cache_type_k, recipe.cache_type_v = types
        weights = sum(
            next(of.kl for of in measured.choices[name] if of.type.name == type_)
            for name, type_ in recipe.tensors.items()
        )
        tried.append(TriedCache(types, n_bytes, kl, recipe, weights, gap))
    tried.sort(key=lambda of: of.total)
    if refused is not None and tried[0].recipe is None:
        raise refused
    return tried


_TRIES = 8
_NEAR = 0.01
"""A bound of bytes that is this near to one that is too large is not raised again."""


def choose_types(
    measured: Measured, plans: Sequence[QuantizationPlan], options: QuantizeOptions, limits: Limits
) -> tuple[Recipe, float]:
    """The recipe within the limits, and how many nats less another can have at most. `plans` are
    those of llama.cpp's types; the nearest gives the tensors that were not measured. Memory and
    speed of a mixture are not the sums over its tensors, because some types are repacked and all
    share the caches: what a mixture takes beyond a limit tightens the bound of the next one, and
    what it leaves raises it again. Raises `UsageError` if nothing is within the limits."""
    source, machine = measured.source, limits.machine
    most = file_bytes = limits.file_bytes(plans[0])
    ns = None
    if machine is not None and limits.speed is not None:
        times, rest = tensor_times(source, measured.plans, machine, limits.cache)
        measured = measured.with_times(times)
        ns = 1e9 / limits.speed - rest
    if limits.memory is not None:
        context = context_memory(source, plans[0], limits.ctx, limits.cache)
        beside = context - plans[0].file_bytes
        of_memory = limits.memory - beside
        if of_memory <= 0:
            raise UsageError(
                f"no mixture is within {limits.memory:,} bytes of memory: the context takes"
                f" {beside:,} besides the weights; a smaller --ctx needs less"
            )
        file_bytes = of_memory if file_bytes is None else min(file_bytes, of_memory)
    best: tuple[Recipe, float] | None = None
    fits, too_much = 0, None
    for _ in range(_TRIES):
        at = source.n_bytes if file_bytes is None else file_bytes
        base = min(plans, key=lambda plan: abs(plan.file_bytes - at))
        chosen = _choose(measured, base, file_bytes, ns)
        recipe = _recipe(measured, chosen, base, options)
        with planned(source, recipe, options) as (_, plan):
            pass
        if ns is not None and machine is not None and limits.speed is not None:
            too_slow = predict_decode(source, plan, machine, limits.cache) - 1e9 / limits.speed
            if too_slow > 0:
                ns -= too_slow
                continue
        excess = 0
        if limits.memory is not None:
            needed = context_memory(source, plan, limits.ctx, limits.cache)
            excess = needed - limits.memory
        if excess <= 0:
            best, fits = (recipe, chosen.gap), at
        else:
            too_much = at
        if too_much is not None:
            if best is not None and too_much - fits <= _NEAR * too_much:
                break
            file_bytes = (fits + too_much) // 2 if best is not None else at - excess
        elif -excess > _NEAR * at and at not in (most, source.n_bytes):
            file_bytes = min(at - excess, source.n_bytes if most is None else most)
        else:
            break
    if best is None:
        raise UsageError("no mixture was found within the limits of memory and speed; relax one")
    return best


def make_again(
    source: ModelFile, recipe: Recipe, options: QuantizeOptions, output: Path, force: bool
) -> QuantizationPlan:
    """Writes the model of a recipe; returns its plan."""
    with (
        planned(source, recipe, options) as (quantizer, plan),
        progress_bar(f"Quantizing {source.path.name}") as on_progress,
    ):
        quantizer.write([plan], [output], force=force, on_progress=on_progress)
    return plan


def _choose(
    measured: Measured, base: QuantizationPlan, n_bytes: int | None, ns: float | None
) -> Chosen:
    """The choices of the tensors that were measured; the others are as in the base type."""
    names = list(measured.choices)
    padded = [
        [replace(of, n_bytes=_padded(of.n_bytes)) for of in measured.choices[n]] for n in names
    ]
    by_name = {tensor.name: tensor for tensor in base.tensors}
    fixed = base.file_bytes - sum(_padded(by_name[name].n_bytes) for name in names)
    bounds = Bounds(None if n_bytes is None else n_bytes - fixed, ns)
    chosen = choose(padded, bounds)
    if chosen is None:
        raise UsageError(f"no mixture is within the limits: {nearest(padded, bounds, fixed)}")
    return chosen


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // _PADDING) * _PADDING


def _recipe(
    measured: Measured, chosen: Chosen, base: QuantizationPlan, options: QuantizeOptions
) -> Recipe:
    pairs = zip(measured.choices.items(), chosen.choices, strict=True)
    return Recipe(
        VERSION,
        measured.source.path.name,
        measured.source.n_bytes,
        base.file_type,
        {name: choices[i].type.name for (name, choices), i in pairs},
        options.imatrix.name if options.imatrix else None,
    )


def predicted_kl(measured: Measured, plan: QuantizationPlan) -> float | None:
    """The KL divergence predicted from the effects of the tensors; None if one has a type that was
    not measured."""
    total = 0.0
    for tensor in plan.tensors:
        choices = measured.choices.get(tensor.name)
        if choices is None:
            continue
        kl = next((of.kl for of in choices if of.type == tensor.type), None)
        if kl is None:
            return None
        total += kl
    return total


def _verified(
    quantizer: Quantizer,
    plans: Sequence[QuantizationPlan],
    text: Calibration,
    made: dict[str, tuple[ModelFile, QuantizationPlan]],
    cache: CacheTypes = F16,
) -> tuple[list[Verified], Estimate]:
    """The models already made, and those of the plans, on the text, with this cache."""
    source = quantizer.source
    with temporary_directory("instr-recipe-") as folder:
        with progress_bar(f"Quantizing {source.path.name}") as on_progress:
            paths = [quantized(folder, plan) for plan in plans]
            quantizer.write(plans, paths, on_progress=on_progress)
        every = made | {
            plan.file_type: (load_model_file(path), plan)
            for plan, path in zip(plans, paths, strict=True)
        }
        with progress_bar("Comparing outputs") as on_progress:
            files = [file for file, _ in every.values()]
            perplexity, outputs = verify(source, files, text, on_progress, cache)
    models = [
        Verified(name, plan, divergence, kl, None)
        for (name, (_, plan)), (divergence, kl) in zip(every.items(), outputs, strict=True)
    ]
    return models, perplexity
