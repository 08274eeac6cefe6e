"""Predicted times of a model, as tables: a row for each file type and number of threads, and where
the time of the first goes.

Invariant: every figure comes from `prediction.model`; a sum over ops, layers or blocks is the time
of the kernels of the same graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.prediction.model import Case, Step
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.report.report import Cell, Column, Report

Z95 = 1.96


def predict_reports(cases: Sequence[Case], past: int, probe: Probe) -> list[Report]:
    """The table of all cases, and the prefill and the decode of the first by op, layer, block."""
    first = cases[0]
    reports = [_overview(cases, past)]
    for name, step in (("prefill", first.prefill), ("decode", first.decode)):
        title = f"{name}, {first.type}, {counted(first.threads, 'thread')}"
        kernels = step.timeline.kernels
        for column, keys in (
            (Column("op"), kernels.label),
            (Column("layer", "layer"), kernels.layer.tolist()),
            (Column("block"), list(kernels.block)),
        ):
            parts = _parts(f"By {column.name}: {title}", column, step, keys)
            reports.append(replace(parts, key=f"{name}_by_{column.name}"))
    reports[0].notes += _notes(cases, probe)
    return reports


def _overview(cases: Sequence[Case], past: int) -> Report:
    energy = any(case.watts for case in cases)
    tokens = cases[0].prefill.tokens
    rows: list[list[Cell]] = []
    for case in cases:
        prefill, prefill_error = case.prefill.predicted.total()
        decode, error = case.decode.predicted.total()
        # a ratio's errors are symmetric in its logarithm
        low, high = (decode * float(np.exp(side * Z95 * error / decode)) for side in (-1, 1))
        row: list[Cell] = [
            case.type, case.threads, prefill, prefill_error / prefill, tokens / prefill * 1e9,
            decode, error / decode, 1e9 / decode, 1e9 / high, 1e9 / low, case.memory,
        ]  # fmt: skip
        if energy:
            row.append(None if case.watts is None else case.watts * decode / 1e9)
        rows.append(row)
    columns = [
        Column("type"), Column("threads", "count"),
        Column("prefill", "ns"), Column("± prefill", "fraction"),
        Column("prefill tokens", "per_second"),
        Column("decode", "ns"), Column("± decode", "fraction"), Column("tokens", "per_second"),
        Column("at least", "per_second"), Column("at most", "per_second"),
        Column("memory", "bytes"),
        *([Column("joules per token", "number")] if energy else []),
    ]  # fmt: skip
    title = f"Predicted: a prefill of {counted(tokens, 'token')}, a decode after {past:,}"
    return Report(title, columns, rows, labels=2, key="predicted")


def _parts(title: str, column: Column, step: Step, keys: Sequence[str | int]) -> Report:
    ns: dict[str | int, float] = defaultdict(float)
    count: dict[str | int, int] = defaultdict(int)
    for key, time in zip(keys, step.predicted.ns.tolist(), strict=True):
        ns[key] += time
        count[key] += 1
    total = sum(ns.values())
    order = list(ns) if column.unit == "layer" else sorted(ns, key=lambda key: -ns[key])
    rows: list[list[Cell]] = [[key, count[key], ns[key], ns[key] / total] for key in order]
    columns = [
        column,
        Column("kernels", "count"),
        Column("time", "ns"),
        Column("share", "fraction"),
    ]
    return Report(title, columns, rows)


def _notes(cases: Sequence[Case], probe: Probe) -> list[str]:
    notes = [
        f"Predicted for {probe.cpu or 'the measured machine'}, measured {probe.time}; nothing was"
        " run.",
        "± is one standard deviation. The decodes per second lie between `at least` and `at most`"
        " with a probability of 95 % if the errors are like those of the measurement.",
    ]
    unknown = dict.fromkeys(
        name
        for case in cases
        for step in (case.prefill, case.decode)
        for name in step.predicted.unknown
    )
    if unknown:
        notes.append(f"Not measured, so predicted from others: {', '.join(unknown)}.")
    if not any(case.watts for case in cases):
        notes.append("Energy is left out: `instr probe` found no counter (RAPL) that it may read.")
    return notes
