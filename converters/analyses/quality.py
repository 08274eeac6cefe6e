"""Quantized models beside the one that they were made from: their sizes, and how quantization
changed what the model says.

Invariant: every table of outputs comes with the number of tokens it was measured on. A report of
plans of files and one of files that were written differ only in their title.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llamacpp_instr.base.terminal import counted, printable
from llamacpp_instr.converters.analyses.tables import grouped, header, without
from llamacpp_instr.lab.quality.divergence import FEW_TOKENS, SHARES, Divergence, Outputs
from llamacpp_instr.lab.quantize.plan import QuantizationPlan
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.report.charts import Chart, Point, scatter_size_error
from llamacpp_instr.report.report import Cell, Figures, Report

if TYPE_CHECKING:
    from llamacpp_instr.lab.weights.figures import Sums

MIB = 1 << 20

_NAMES = {0.0: "smallest", 0.5: "median", 1.0: "largest"}


def compute_quality(
    outputs: Outputs, files: Sequence[ModelFile], text: str | None, weights: Sequence[Sums] = ()
) -> list[Report]:
    """The tables of a comparison: of all candidates, of the perplexities, and for each candidate of
    the divergence of its probabilities. `files` are the reference and its candidates. `text` is the
    name of the text, or None if the reference wrote it. `weights` are the errors of all weights of
    each candidate, if they were computed."""
    reference, *names = names_of(outputs, files)
    pairs = list(zip(names, outputs.divergences, strict=True))
    rows: list[list[Cell]] = [
        [
            name, its.ratio.value, its.ratio.error, its.difference.value, its.difference.error,
            None if math.isnan(its.correlation) else its.correlation,
        ]
        for name, its in pairs
    ]  # fmt: skip
    columns = header(
        "model", ("perplexity", "ratio", "± ratio", "difference", "± difference"),
        ("probability", "correlation"),
    )  # fmt: skip
    return [
        _overview(outputs, files, text, weights),
        Report(f"Perplexity against {reference}", columns, rows, key="perplexity"),
        *(_distribution(name, divergence, reference) for name, divergence in pairs),
    ]


def draw_divergence(outputs: Outputs, files: Sequence[ModelFile]) -> Chart:
    """The mean KL divergence of each candidate over the size of its file."""
    candidates = zip(names_of(outputs, files)[1:], files[1:], outputs.divergences, strict=True)
    points = [
        Point(name, file.file_size / MIB, its.kl.value, its.kl.half_interval)
        for name, file, its in candidates
    ]
    axis = "mean KL divergence, nats"
    return scatter_size_error("KL divergence against size", "file, MiB", axis, points)


def short_names(files: Sequence[ModelFile]) -> list[str]:
    """The names of the files; their paths if two have the same name."""
    short = [file.path.name for file in files]
    if len(set(short)) < len({file.path for file in files}):
        return [str(file.path) for file in files]
    return short


def names_of(outputs: Outputs, files: Sequence[ModelFile]) -> list[str]:
    """The names of the reference and its candidates: of their files, of their caches, or of both;
    what all share is not named."""
    names = short_names(files)
    if not outputs.caches:
        return names
    caches = [cache.types.name for cache in outputs.caches]
    if len({*names}) == 1:
        return caches
    return [f"{name}, {cache}" for name, cache in zip(names, caches, strict=True)]


def _overview(
    outputs: Outputs, files: Sequence[ModelFile], text: str | None, weights: Sequence[Sums]
) -> Report:
    names = names_of(outputs, files)
    columns = header(
        "model", ("bytes", "size"), ("bits", "bits/weight"), ("decibel", "SQNR"),
        ("perplexity", "perplexity", "± ppl"), ("ratio", "ppl ratio"),
        ("nats", "mean KL", "± KL", "99.9 % KL"), ("probability", "same top", "RMS Δp"),
    )  # fmt: skip
    rows: list[list[Cell]] = []
    for i, (file, name) in enumerate(zip(files, names, strict=True)):
        row: list[Cell] = [name, file.file_size, 8 * file.n_bytes / file.n_elements]
        row.append(weights[i - 1].sqnr_db if i and weights else None)
        if i == 0:
            row += [outputs.perplexity.value, outputs.perplexity.error, *[None] * 6]
        else:
            its = outputs.divergences[i - 1]
            row += [its.perplexity.value, its.perplexity.error, its.ratio.value]
            row += [its.kl.value, its.kl.error, its.kl_percentiles[SHARES.index(0.999)]]
            row += [its.same_top.value, its.delta_p_rms.value]
        rows.append(row)
    figures: Figures = {
        "chunks": (outputs.n_chunks, "count"),
        "tokens of a chunk": (outputs.ctx, "count"),
        "tokens scored": (outputs.n_scored, "count"),
        "seed": (None if text else outputs.seed, "count"),
    }
    written = f"written by {short_names(files)[0]} itself (temperature 1, seed {outputs.seed})"
    chunks = f"{counted(outputs.n_chunks, 'chunk')} of {counted(outputs.ctx, 'token')}"
    notes = [
        f"Text: {text or written}; {chunks}. The {outputs.n_scored:,} tokens in the second halves "
        "are scored.",
        "KL is the KL divergence from the reference's probabilities in nats; Δp is the change of "
        "the probability of the text's own token; ± is one standard error.",
    ]
    if weights:
        notes.append("SQNR covers all weights.")
    if outputs.n_scored < FEW_TOKENS:
        notes.append(f"Fewer than {FEW_TOKENS} tokens give unreliable figures; use a longer text.")
    title = f"Outputs against {names[0]}"
    return Report(title, columns, rows, notes, figures=figures, key="outputs")


def _distribution(name: str, its: Divergence, reference: str) -> Report:
    percentiles = zip(SHARES, its.kl_percentiles, its.delta_p_percentiles, strict=True)
    by_share: list[list[Cell]] = [
        [_NAMES.get(share, f"{100 * share:g} %"), kl, delta_p] for share, kl, delta_p in percentiles
    ]
    rows: list[list[Cell]] = [
        ["mean", its.kl.value, its.delta_p.value],
        ["± mean", its.kl.error, its.delta_p.error],
        ["RMS", None, its.delta_p_rms.value],
        ["± RMS", None, its.delta_p_rms.error],
        *reversed(by_share),
    ]
    note = f"Same top token: {100 * its.same_top.value:.3f} ± {100 * its.same_top.error:.3f} %."
    figures: Figures = {
        "same top": (its.same_top.value, "probability"),
        "± same top": (its.same_top.error, "probability"),
    }
    title = f"{name} against {reference}, by token"
    columns = header("of the tokens", ("nats", "KL"), ("probability", "Δp"))
    return Report(title, columns, rows, [note], figures=figures, key="by_token")


# --- sizes ---


def quantization_reports(
    plans: Sequence[QuantizationPlan], paths: Sequence[Path], *, written: bool
) -> list[Report]:
    """A row per file, and the tensors that fell back; `paths` are those of the files, in order."""
    source = plans[0].source.name
    place = f" into {paths[0].parent}" if paths[0].parent != Path() else ""
    title = f"Quantized from {source}{place}" if written else f"What {source} would become"
    again = max(sum(tensor.requantized for tensor in plan.tensors) for plan in plans)
    notes = [f"Quantized before: {counted(again, 'tensor')}, whose errors add up."] if again else []
    columns = header(
        "file", "type", ("count", "bytes"), ("bits", "bits/weight"), ("fraction", "of source"),
        ("count", "fell back"), "needs",
    )  # fmt: skip
    rows: list[list[Cell]] = [
        [
            path.name, plan.file_type, plan.file_bytes, plan.bits_per_weight,
            plan.n_bytes / plan.source_bytes, len(plan.fallbacks),
            "imatrix" if plan.needs_imatrix else None,
        ]
        for plan, path in zip(plans, paths, strict=True)
    ]  # fmt: skip
    figures: Figures = {
        "source": (plans[0].source_bytes, "bytes"),
        "tensors quantized before": (again, "count"),
    }
    sizes = Report(printable(title), columns, rows, notes, figures=figures, key="files")
    return [sizes if written else without(sizes, "file"), *_fallbacks(plans)]


def list_tensors(plans: Sequence[QuantizationPlan]) -> Report:
    """Every tensor of every file: its type before and after, and the intended type if it fell
    back."""
    columns = header("type", "tensor", "shape", "from", "to", "meant", ("bytes", "bytes"))
    rows: list[list[Cell]] = [
        [
            plan.file_type, tensor.name, "x".join(map(str, tensor.weight.ne)),
            tensor.weight.type.name, tensor.type.name,
            tensor.fallback_from.name if tensor.fallback_from else None, tensor.n_bytes,
        ]
        for plan in plans
        for tensor in plan.tensors
    ]  # fmt: skip
    return Report("Tensors", columns, rows)


def _fallbacks(plans: Sequence[QuantizationPlan]) -> list[Report]:
    """Tensors whose rows the blocks of the intended type do not divide, grouped by the result."""
    rows: list[list[Cell]] = []
    for plan in plans:
        groups = grouped(plan.fallbacks, lambda of: (str(of.fallback_from), str(of.type)))
        for (meant, got), of in groups.items():
            lengths = ", ".join(map(str, sorted({tensor.weight.row_length for tensor in of})))
            first = printable(of[0].name)
            rows.append([plan.file_type, meant, got, len(of), lengths, first])
    if not rows:
        return []
    columns = header("type", "meant", "got", ("count", "tensors"), "row length", "first")
    note = "Blocks of the intended type do not divide these rows: most types need multiples of 256."
    return [Report("Tensors that fall back to another type", columns, rows, [note])]
