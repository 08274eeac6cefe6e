"""How quantization changed a model's outputs, as tables: one of all candidates, one of the
perplexities, and one per candidate of the divergence of its probabilities from the reference's.

Invariant: every table comes with the number of tokens it was measured on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.lab.quality.divergence import FEW_TOKENS, SHARES, Divergence, Outputs
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.report.charts import Chart, Point, scatter_size_error
from llamacpp_instr.report.report import Cell, Column, Figures, Report, columns_of

if TYPE_CHECKING:
    from llamacpp_instr.lab.weights.error import Sums

MIB = 1 << 20

_NAMES = {0.0: "smallest", 0.5: "median", 1.0: "largest"}


def compute_quality(
    outputs: Outputs, files: Sequence[ModelFile], text: str | None, weights: Sequence[Sums] = ()
) -> list[Report]:
    """The tables of a comparison. `files` are the reference and its candidates. `text` is the name
    of the text, or None if the reference wrote it. `weights` are the errors of all weights of each
    candidate, if they were computed."""
    names = short_names(files)
    pairs = list(zip(names[1:], outputs.divergences, strict=True))
    return [
        _overview(outputs, files, text, weights),
        _perplexities(pairs, names[0]),
        *(_distribution(name, divergence, names[0]) for name, divergence in pairs),
    ]


def draw_divergence(outputs: Outputs, files: Sequence[ModelFile]) -> Chart:
    """The mean KL divergence of each candidate over the size of its file."""
    points = [
        Point(name, file.file_size / MIB, divergence.kl.value)
        for name, file, divergence in zip(
            short_names(files)[1:], files[1:], outputs.divergences, strict=True
        )
    ]
    axis = "mean KL divergence, nats"
    return scatter_size_error("KL divergence against size", "file, MiB", axis, points)


def short_names(files: Sequence[ModelFile]) -> list[str]:
    """The names of the files; their paths if two have the same name."""
    short = [file.path.name for file in files]
    if len(set(short)) < len({file.path for file in files}):
        return [str(file.path) for file in files]
    return short


def _overview(
    outputs: Outputs, files: Sequence[ModelFile], text: str | None, weights: Sequence[Sums]
) -> Report:
    names = short_names(files)
    columns = [
        Column("model"),
        Column("size", "bytes"),
        Column("bits/weight", "bits"),
        Column("SQNR", "decibel"),
        *columns_of("perplexity", "perplexity", "± ppl"),
        Column("ppl ratio", "ratio"),
        *columns_of("nats", "mean KL", "± KL", "99.9 % KL"),
        *columns_of("probability", "same top", "RMS Δp"),
    ]
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
    notes = _notes(outputs, names[0], text, weights)
    title = f"Outputs against {names[0]}"
    return Report(title, columns, rows, notes, figures=figures, key="outputs")


def _notes(
    outputs: Outputs, reference: str, text: str | None, weights: Sequence[Sums]
) -> list[str]:
    written = f"written by {reference} itself (temperature 1, seed {outputs.seed})"
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
    return notes


def _perplexities(pairs: Sequence[tuple[str, Divergence]], reference: str) -> Report:
    columns = [
        Column("model"),
        *columns_of("perplexity", "ratio", "± ratio", "difference", "± difference"),
        Column("correlation", "probability"),
    ]
    rows: list[list[Cell]] = [
        [
            name,
            its.ratio.value,
            its.ratio.error,
            its.difference.value,
            its.difference.error,
            None if math.isnan(its.correlation) else its.correlation,
        ]
        for name, its in pairs
    ]
    return Report(f"Perplexity against {reference}", columns, rows, key="perplexity")


def _distribution(name: str, its: Divergence, reference: str) -> Report:
    columns = [Column("of the tokens"), Column("KL", "nats"), Column("Δp", "probability")]
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
    return Report(title, columns, rows, [note], figures=figures, key="by_token")
