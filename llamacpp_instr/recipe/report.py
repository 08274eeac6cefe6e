"""The tables and charts of `instr recipe`."""

from __future__ import annotations

from collections.abc import Sequence

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.tables import grouped, header
from llamacpp_instr.lab.quality.divergence import Estimate
from llamacpp_instr.prediction.model import Case
from llamacpp_instr.recipe.measure import Measured
from llamacpp_instr.recipe.run import Found, TriedCache
from llamacpp_instr.recipe.verify import F16, Verified, difference
from llamacpp_instr.report.charts import Chart, Point, scatter_size_error
from llamacpp_instr.report.report import Cell, Figures, Report

_MIB = 1 << 20
_MEANT = "mean KL divergence, nats"


# --- which type? ---


def dominated(rows: Sequence[tuple[float, ...]]) -> list[int | None]:
    """For each row, the index of one that is smaller in some value and larger in none; None if
    there is none."""
    found: list[int | None] = []
    for row in rows:
        better = (
            i
            for i, other in enumerate(rows)
            if other != row and all(a <= b for a, b in zip(other, row, strict=True))
        )
        found.append(next(better, None))
    return found


def type_reports(
    types: Sequence[Verified], perplexity: Estimate, cases: Sequence[Case], bounds: str
) -> list[Report]:
    """A row for each type: its size, speed, memory and divergence, and the type that beats it, if
    there is one; and a recommendation. `cases` are predictions for the types, in the same order, or
    empty; `bounds` says on which text the outputs were compared."""
    by_type = {case.type: case for case in cases}
    seen: list[tuple[float, ...]] = []
    rows: list[list[Cell]] = []
    for of in types:
        case = by_type.get(of.name)
        times: list[float | None] = [None, None, None]
        if case is not None:
            prefill, decode = (step.predicted.total()[0] for step in (case.prefill, case.decode))
            times = [case.prefill.tokens / prefill * 1e9, 1e9 / decode, case.memory]
            seen.append((of.plan.file_bytes, of.outputs.kl.value, prefill, decode))
        else:
            seen.append((of.plan.file_bytes, of.outputs.kl.value))
        rows.append(
            [
                of.name, of.plan.file_bytes, of.plan.bits_per_weight, *times,
                of.outputs.kl.value, of.outputs.kl.error, of.outputs.perplexity.value,
                of.outputs.ratio.value, of.outputs.same_top.value,
            ]
        )  # fmt: skip
    beaten = dominated(seen)
    for row, by in zip(rows, beaten, strict=True):
        row.append(None if by is None else types[by].name)
    columns = header(
        "type", ("bytes", "size"), ("bits", "bits/weight"), ("per_second", "prefill", "decode"),
        ("bytes", "memory"), ("nats", "KL", "± KL"), ("perplexity", "perplexity"),
        ("ratio", "ppl ratio"), ("probability", "same top"), "beaten by",
    )  # fmt: skip
    notes = [bounds, f"The model itself has a perplexity of {perplexity.value:.4g}."]
    if cases:
        notes.append(
            "Prefill and decode are predicted tokens per second on one thread"
            if cases[0].threads == 1
            else f"Prefill and decode are predicted tokens per second on {cases[0].threads} threads"
        )
        notes[-1] += ", memory is what a context takes; `instr probe` measured the machine."
    else:
        notes.append("After `instr probe` on this machine, the table also has speeds and memory.")
    notes.append("A type is beaten by another that is no larger, no slower and diverges no more.")
    best = recommended(types, beaten)
    notes.append(_why(types, best))
    return [Report("Types of llama.cpp", columns, rows, notes, key="types")]


LITTLE = 0.01
"""nats: with a KL divergence below it, answers differ little from the original's"""


def recommended(types: Sequence[Verified], beaten: Sequence[int | None]) -> int:
    """The index of the smallest type whose KL divergence is below LITTLE, else of the one that
    diverges least; never one that is beaten."""
    kept = [i for i, by in enumerate(beaten) if by is None]
    little = [i for i in kept if types[i].outputs.kl.value <= LITTLE]
    if little:
        return min(little, key=lambda i: types[i].plan.file_bytes)
    return min(kept, key=lambda i: types[i].outputs.kl.value)


def _why(types: Sequence[Verified], best: int) -> str:
    of = types[best]
    kl = of.outputs.kl.value
    what = f"{of.plan.bits_per_weight:.2f} bits per weight, KL divergence {kl:.2g} nats"
    if kl <= LITTLE:
        return f"Take {of.name} ({what}): the smallest that diverges by less than {LITTLE:g} nats."
    return (
        f"Take {of.name} ({what}): it diverges least, and no type diverges by less than {LITTLE:g}."
    )


def size_chart(types: Sequence[Verified], title: str) -> Chart:
    """The KL divergence of each model over its size."""
    points = [
        Point(of.name, of.plan.file_bytes / _MIB, of.outputs.kl.value, of.outputs.kl.half_interval)
        for of in types
    ]
    return scatter_size_error(title, "file, MiB", _MEANT, points)


# --- a recipe ---


def recipe_reports(found: Found, measured: Measured, text: str) -> list[Report]:
    """The recipe beside types of llama.cpp; the caches, if there are several; and what each group
    of tensors got."""
    recipe, *others = models = found.models
    rows: list[list[Cell]] = []
    for of in models:
        apart = difference(of.kl, recipe.kl)
        rows.append(
            [
                of.name, of.plan.file_bytes, of.plan.bits_per_weight, of.predicted,
                of.outputs.kl.value, of.outputs.kl.error,
                *([None, None] if of is recipe else [apart.value, apart.half_interval]),
                of.outputs.perplexity.value, of.outputs.same_top.value,
            ]
        )  # fmt: skip
    columns = header(
        "model", ("bytes", "size"), ("bits", "bits/weight"), ("nats", "predicted KL", "KL", "± KL"),
        ("nats", "KL more", "± 95 %"), ("perplexity", "perplexity"), ("probability", "same top"),
    )  # fmt: skip
    notes = [text, *(_verdict(recipe, of) for of in others)]
    notes.append(
        f"The model itself has a perplexity of {found.perplexity.value:.4g}. The effects of the"
        f" groups add up to {sum(measured.effects.values()):.3g} nats; all groups together have"
        f" {measured.whole:.3g}."
    )
    if (gap := found.gap) > 0:
        notes.append(
            f"The solver ran out of time: the best mixture can have at most {gap:.2g} nats less."
        )
    figures: Figures = {
        "effects of groups": (sum(measured.effects.values()), "nats"),
        "effect of all": (measured.whole, "nats"),
        "gap of the solver": (gap, "nats"),
    }
    return [
        Report("Recipe", columns, rows, notes, figures=figures, key="recipe"),
        *([_caches(found.caches)] if any(of.types != F16 for of in found.caches) else []),
        _groups(recipe, measured),
    ]


def _caches(tried: Sequence[TriedCache]) -> Report:
    rows: list[list[Cell]] = [
        [of.types.name, of.n_bytes, of.kl, *([of.weights, of.total] if of.recipe else [None] * 2)]
        for of in tried
    ]
    columns = header(
        "cache", ("bytes", "bytes"), ("nats", "KL alone", "KL of the weights", "together")
    )
    k, v = tried[0].types
    notes = [
        f"Run the model with --cache-type-k {k} --cache-type-v {v}. KL alone is measured on short"
        " texts, and grows with the context (`instr quality --cache-type-k`); KL of the weights is"
        " predicted for the best mixture beside this cache."
    ]
    if any(of.recipe is None for of in tried):
        notes.append("With a cache without figures, no mixture is within the limits.")
    return Report("Types of the cache, best first", columns, rows, notes, key="caches")


def _verdict(recipe: Verified, other: Verified) -> str:
    apart = difference(other.kl, recipe.kl)
    share = recipe.plan.file_bytes / other.plan.file_bytes - 1
    size = f"{abs(share):.1%} {'more' if share > 0 else 'fewer'} bytes than {other.name}"
    size = size.replace("%", " %")
    if abs(apart.value) <= apart.half_interval:
        return f"With {size}, it diverges as much: the 95 % interval of the difference includes 0."
    factor = other.outputs.kl.value / recipe.outputs.kl.value
    how = "less" if apart.value > 0 else "more"
    if not recipe.outputs.kl.value > 0:
        return f"With {size}, it diverges {how}."
    factor = other.outputs.kl.value / recipe.outputs.kl.value
    its = f"the KL divergence of {other.name} is {factor:.2f} times as large"
    return f"With {size}, it diverges {how}: {its}."


def _groups(recipe: Verified, measured: Measured) -> Report:
    planned = {tensor.name: tensor for tensor in recipe.plan.tensors}
    kl = {
        name: {of.type.name: of.kl for of in choices} for name, choices in measured.choices.items()
    }
    rows: list[list[Cell]] = []
    for key, names in measured.groups.items():
        tensors = [planned[name] for name in names]
        types = grouped(tensors, lambda of: of.type)
        smallest_first = sorted(types, key=lambda of: of.bits_per_weight)
        mixture = ", ".join(f"{len(types[of])} {of}" for of in smallest_first)
        n_bytes = sum(of.n_bytes for of in tensors)
        elements = sum(of.weight.n_elements for of in tensors)
        own = sum(kl[of.name][of.type.name] for of in tensors)
        rows.append([key, mixture, n_bytes, 8 * n_bytes / elements, measured.effects[key], own])
    columns = header(
        "tensors", "types", ("bytes", "bytes"), ("bits", "bits/weight"),
        ("nats", "KL alone", "KL here"),
    )  # fmt: skip
    note = (
        "KL alone is measured with only these tensors at about 4.5 bits per weight. KL here is"
        " predicted for the types that they got."
    )
    fell = len(recipe.plan.fallbacks)
    notes = [note] + [f"{counted(fell, 'tensor')} fell back to another type."] * bool(fell)
    return Report("Groups of tensors", columns, rows, notes, key="groups")
