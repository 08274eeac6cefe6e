"""The tables and charts of a comparison node by node."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.diverge.run import Divergences, TensorError
from llamacpp_instr.diverge.shares import Shares
from llamacpp_instr.model.file import role_of
from llamacpp_instr.report.charts import Chart, lines_by_layer, map_by_layer
from llamacpp_instr.report.report import Cell, Column, Figures, Report, columns_of, known, shown

MOST = 10
"""rows of a table of the worst, in text"""
MOST_SHARES = 20
_NUMBERED = re.compile(r"node_\d+$")
_NAMED = (Column("tensor"), Column("op"), Column("layer", "layer"))
_NEVER_ZERO = 1e-12
"""A map shows a smaller error as this value: its colours follow the logarithm."""


def first_beyond(errors: Sequence[TensorError], bound: float) -> TensorError | None:
    """The first tensor, in the order of computation, whose relative error in a part of the tokens
    exceeds `bound`. Earlier parts come first: what a later part reads from the cache or from a
    recurrent state was computed in an earlier one."""
    for part in range(max((len(e.parts) for e in errors), default=0)):
        for e in errors:
            if part < len(e.parts) and e.parts[part] > bound:
                return e
    return None


def divergence_reports(
    found: Divergences, a: Path, b: Path, bound: float, every_row: bool
) -> list[Report]:
    """By layer; the causes; outlier channels; positions; and last, with `every_row`, all tensors.
    Without it, long tables have their worst rows only."""
    most = None if every_row else MOST
    causes = _worst(found, most)
    if found.shares is not None:
        causes = _shares(found.shares, None if every_row else MOST_SHARES)
    layers, channels = _by_layer(found, a, b, bound), _channels(found.errors, most)
    every = [all_tensors(found.errors)] if every_row else []
    return [layers, causes, channels, _positions(found, most), *every]


def all_tensors(errors: Sequence[TensorError]) -> Report:
    """A row for each tensor, in the order in which they are computed."""
    columns = [
        *_NAMED, Column("block"), *columns_of("number", "relative error", "NMSE"),
        Column("cosine", "cosine"), Column("added", "number"), Column("elements", "count"),
        Column("reads"),
    ]  # fmt: skip
    added = _added(errors)
    rows: list[list[Cell]] = [
        [
            _name(e), e.op, e.layer, e.block, e.relative, e.nmse, e.cosine, added[i], e.n,
            ", ".join(e.weights),
        ]
        for i, e in enumerate(errors)
    ]  # fmt: skip
    title = "All tensors, in the order in which they are computed"
    return Report(title, columns, rows, labels=2, key="tensors")


def divergence_charts(found: Divergences) -> list[Chart]:
    """Maps of layers by tensors, coloured by error and by share; errors along the layers."""
    of_layers = [e for e in found.errors if e.layer >= 0 and not e.is_index]
    layers = sorted({e.layer for e in of_layers})
    names = [shown(layer, "layer") for layer in layers]
    if not layers:
        return []

    def layers_by(what: str, of: Mapping[tuple[int, str], float], axis: str) -> Chart:
        labels = list(dict.fromkeys(label for _, label in of))
        cells = [[of.get((layer, label)) for label in labels] for layer in layers]
        return map_by_layer(what, axis, names, cells, labels)

    errors = {
        (e.layer, label): max(e.relative, _NEVER_ZERO)
        for e, label in zip(of_layers, _labels(of_layers), strict=True)
    }
    ends = {
        f"after {what}": [_end(of_layers, layer, what) for layer in layers]
        for what in ("attention", "feed-forward")
    }
    order = "tensor, in the order in which they are computed"
    charts = [
        layers_by("Relative error: layers by tensors", errors, order),
        lines_by_layer("Relative error along the layers", "relative error", names, ends),
    ]
    parts = {
        (share.layer, role_of(name)): share.kl / len(share.names)
        for share in (found.shares.shares if found.shares else ())
        for name in share.names
        if share.layer >= 0
    }
    if parts:
        title = "Share of the KL divergence in nats: layers by weights"
        charts.append(layers_by(title, parts, "weight"))
    return charts


def _by_layer(found: Divergences, a: Path, b: Path, bound: float) -> Report:
    errors = found.errors
    layers = sorted({e.layer for e in errors if e.layer >= 0})
    rows: list[list[Cell]] = []
    before: float | None = None
    for layer in layers:
        own = [e for e in errors if e.layer == layer]
        end = own[-1]
        growth = end.relative / before if before and math.isfinite(before) else None
        ends = (_end(own, layer, block) for block in ("attention", "feed-forward"))
        rows.append([layer, *ends, end.relative, growth, end.cosine])
        before = end.relative
    columns = [
        Column("layer", "layer"),
        *columns_of("number", "after attention", "after feed-forward", "at its end"),
        Column("growth", "ratio"), Column("cosine", "cosine"),
    ]  # fmt: skip
    first = first_beyond(errors, bound)
    title = f"No tensor differs by more than {bound:g}"
    if first is not None:
        title = f"The first op beyond {bound:g} is {_name(first)} ({first.op})"
        if first.weights:
            title += f", which reads {', '.join(first.weights)}"
    report = Report(title, columns, rows, key="layers")
    report.notes = [
        f"A is {a}, B is {b}.",
        "The relative error is the norm of the difference divided by the norm of A's values: the"
        " root of the NMSE.",
    ]
    if first is not None:
        report.figures["first beyond the bound"] = (known(first.relative), "number")
        report.notes.append(
            f"The relative error of {_name(first)} is {shown(first.relative, 'number')}."
        )
    finite = found.kl[np.isfinite(found.kl)]
    if len(finite):
        kl = float(finite.mean(dtype=np.float64))
        report.figures["KL divergence"] = (kl, "nats")
        report.notes.append(
            f"The KL divergence of B from A is {shown(kl, 'nats')} nats, the mean over"
            f" {counted(len(finite), 'token')}."
        )
    else:
        report.notes.append("A or B has logits that are not numbers, so there is no KL divergence.")
    report.figures["values in memory"] = (found.most_bytes, "bytes")
    report.notes += found.notes
    return report


def _worst(found: Divergences, most: int | None) -> Report:
    """The ops that read a weight that differs: all others only pass errors on, or amplify them."""
    errors, differ = found.errors, set(found.differ)
    added = _added(errors)
    order = [i for i, e in enumerate(errors) if differ.intersection(e.weights)]
    order.sort(key=lambda i: -(added[i] or 0.0))
    columns = [*_NAMED, Column("added", "number"), Column("reads")]
    rows: list[list[Cell]] = [
        [_name(e), e.op, e.layer, added[i], ", ".join(e.weights)]
        for i, e in ((i, errors[i]) for i in order[:most])
    ]
    note = (
        "Only ops that read a weight that differs. added: the error that the op itself adds; its"
        " square and that of its sources' largest error add up to the square of its relative error."
        " --why measures what each weight costs."
    )
    return Report("Ops that add the most error", columns, rows, [note])


def _channels(errors: Sequence[TensorError], most: int | None) -> Report:
    """The worst channel of each tensor that has channels."""
    rows: list[list[Cell]] = []
    for e in errors:
        if e.channels is None or not e.error:
            continue
        worst = int(e.channels[0].argmax())
        error, own = e.channels[:, worst].tolist()
        share = error / e.error
        relative = math.sqrt(error / own) if own else math.inf
        rows.append([_name(e), e.layer, worst, share, share * e.channels.shape[1], relative])
    rows.sort(key=lambda row: -float(row[4] or 0))
    columns = [
        Column("tensor"), Column("layer", "layer"), Column("channel", "id"),
        Column("squared error", "fraction"), *columns_of("number", "× mean", "relative error"),
    ]  # fmt: skip
    note = (
        "For each tensor, the channel with the largest squared error: its share of the sum over all"
        " channels, and its ratio to their mean."
    )
    return Report("Outlier channels", columns, rows[:most], [note])


def _positions(found: Divergences, most: int | None) -> Report:
    ends = [e for e in found.errors if e.rows]
    along = np.concatenate(ends[-1].rows, axis=1) if ends else np.zeros((2, 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.sqrt(along[0] / along[1])
    chunks = [int(n) for n in np.cumsum(np.array(found.positions) == 0)]
    order = np.argsort(-np.nan_to_num(found.kl, nan=-1.0), kind="stable")[:most]
    columns = [
        Column("token"), Column("chunk", "count"), Column("position", "id"),
        Column("KL divergence", "nats"), Column("error of the last layer", "number"),
    ]  # fmt: skip
    rows: list[list[Cell]] = [
        [
            found.tokens[i], chunks[i], found.positions[i], known(float(found.kl[i])),
            known(float(relative[i])) if i < len(relative) else None,
        ]
        for i in map(int, order)
    ]  # fmt: skip
    return Report("Positions that suffer most", columns, rows, labels=3)


def _shares(shares: Shares, most: int | None) -> Report:
    total = shares.sum
    rows: list[list[Cell]] = []
    for share in sorted(shares.shares, key=lambda share: -share.kl)[:most]:
        n = len(share.names)
        what = share.names[0] if n == 1 else f"{share.part}: {n} weights"
        rows.append([what, share.layer, share.kl, share.kl / total if total > 0 else None])
    columns = [
        Column("weight of B"), Column("layer", "layer"), Column("KL divergence", "nats"),
        Column("share", "share"),
    ]  # fmt: skip
    of_whole = f", {100 * total / shares.whole:.0f} % of it" if shares.whole > 0 else ""
    notes = [
        f"With all weights of B it is {shown(shares.whole, 'nats')} nats; the shares add up to"
        f" {shown(total, 'nats')}{of_whole}.",
        f"{shares.exchanges:,} exchanges were measured; groups of less than 1 % were not divided.",
    ]
    figures: Figures = {
        "sum": (total, "nats"),
        "all exchanged": (shares.whole, "nats"),
        "exchanges": (shares.exchanges, "count"),
    }
    title = "Why: the KL divergence of A with weights of B"
    notes = notes if shares.shares else ["All weights are the same."]
    return Report(title, columns, rows, notes, figures=figures, labels=2)


def _added(errors: Sequence[TensorError]) -> list[float | None]:
    """For each tensor, the root of the difference between the squares of its relative error and of
    the largest one of its sources."""
    by_key = {e.key: e for e in errors}
    found: list[float | None] = []
    for e in errors:
        before = max((by_key[key].nmse for key in e.sources if key in by_key), default=0.0)
        comparable = not e.is_index and math.isfinite(before)
        found.append(math.sqrt(max(e.nmse - before, 0.0)) if comparable else None)
    return found


def _end(errors: Sequence[TensorError], layer: int, block: str) -> float | None:
    """The relative error of the last tensor of a block."""
    own = [e.relative for e in errors if e.layer == layer and e.block == block and not e.is_index]
    return own[-1] if own else None


def _name(error: TensorError) -> str:
    return error.key.name + (f" #{error.key.place + 1}" if error.key.place else "")


def _labels(errors: Sequence[TensorError]) -> list[str]:
    """What each tensor is called in every layer: its name without the layer or, for one that
    llama.cpp only numbers (`node_21`), its op."""
    seen: Counter[tuple[int, str]] = Counter()
    labels = []
    for e in errors:
        label = _name(e).replace(f"-{e.layer}", "", 1)
        if _NUMBERED.match(e.key.name):
            seen[e.layer, e.op] += 1
            n = seen[e.layer, e.op]
            label = e.op + (f" #{n}" if n > 1 else "")
        labels.append(label)
    return labels
