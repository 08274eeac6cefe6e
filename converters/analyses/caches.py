"""Quantized KV caches beside one of f16: how each changes the outputs, also by position in the
context, and its memory and speed.

Invariant: the figures of the outputs are those of the second halves of the chunks, as in all tables
of outputs, except those by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.bench import Repetition, compare_speeds
from llamacpp_instr.converters.analyses.quality import MIB, names_of
from llamacpp_instr.converters.analyses.tables import header
from llamacpp_instr.lab.quality.divergence import AtPositions, Outputs, round_of
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.report.charts import Chart, Point, lines_by_range, scatter_size_error
from llamacpp_instr.report.report import Cell, Column, Report

KL = "mean KL divergence, nats"


def cache_reports(outputs: Outputs, files: Sequence[ModelFile], threads: int) -> list[Report]:
    """The caches side by side, their differences by position, and their speeds with `threads`.
    `files` are those of the reference and its candidates."""
    names = names_of(outputs, files)
    speeds = _repetitions(outputs, threads)
    rows: list[list[Cell]] = []
    for i, (name, cache) in enumerate(zip(names, outputs.caches, strict=True)):
        row: list[Cell] = [name, cache.n_bytes, cache.n_bytes / outputs.caches[0].n_bytes]
        if i == 0:
            row += [outputs.perplexity.value, None, None, None]
        else:
            its = outputs.divergences[i - 1]
            row += [its.perplexity.value, its.kl.value, its.kl.error, its.same_top.value]
        rows.append([*row, *(fmean(of.rate for of in own) for own in speeds[i])])
    columns = header(
        "cache", ("bytes", "memory"), ("fraction", "of f16"), ("perplexity", "perplexity"),
        ("nats", "mean KL", "± KL"), ("probability", "same top"),
        Column("prefill t/s", "rate", "prefill_tokens_per_s"),
        Column("decode t/s", "rate", "decode_tokens_per_s"),
    )  # fmt: skip
    timed = round_of(outputs.ctx)
    notes = [
        f"Memory is llama.cpp's own plan. Prefill is {counted(timed.prompt, 'token')} at once, "
        f"decode {timed.following} one by one after them; both together fill the context.",
    ]
    title = f"KV caches of {counted(outputs.ctx, 'token')}"
    return [
        Report(title, columns, rows, notes, key="caches"),
        _by_position(outputs.by_position, names),
        compare_speeds([(n, own) for n, of in zip(names, speeds, strict=True) for own in of]),
    ]


def draw_caches(outputs: Outputs, files: Sequence[ModelFile]) -> list[Chart]:
    """The mean KL divergence of each candidate by position, and over the memory of its cache."""
    names = names_of(outputs, files)[1:]
    lines = {
        name: [at.divergences[i].kl.value for at in outputs.by_position]
        for i, name in enumerate(names)
    }
    points = [
        Point(name, cache.n_bytes / MIB, its.kl.value, its.kl.half_interval)
        for name, cache, its in zip(names, outputs.caches[1:], outputs.divergences, strict=True)
    ]
    ranges = [_range(at) for at in outputs.by_position]
    return [
        lines_by_range("KL divergence by position", "tokens of context", KL, ranges, lines),
        scatter_size_error("KL divergence against memory", "cache, MiB", KL, points),
    ]


def _by_position(parts: Sequence[AtPositions], names: Sequence[str]) -> Report:
    rows: list[list[Cell]] = [
        [
            name, _range(at), at.n_scored, its.perplexity.value, its.ratio.value, its.kl.value,
            its.kl.error, its.same_top.value, its.same_top.error,
        ]
        for i, name in enumerate(names[1:])
        for at in parts
        for its in [at.divergences[i]]
    ]  # fmt: skip
    columns = header(
        "cache", "context", ("count", "tokens"), ("perplexity", "perplexity"),
        ("ratio", "ppl ratio"), ("nats", "mean KL", "± KL"),
        ("probability", "same top", "± same top"),
    )  # fmt: skip
    notes = [
        "Context is the number of tokens that a prediction depends on; tokens are the predictions. "
        "The last range is the second half of the chunks, which the other tables cover."
    ]
    return Report(f"Against {names[0]}, by position", columns, rows, notes, labels=2,
                  key="by_position")  # fmt: skip


def _range(at: AtPositions) -> str:
    return f"{at.first}-{at.last}"


def _repetitions(outputs: Outputs, threads: int) -> list[list[list[Repetition]]]:
    """For each cache, the rounds of the prompt, and those of the tokens after it."""
    depth, prompt, following = round_of(outputs.ctx)
    tests = (prompt, 0, depth), (0, following, depth + prompt)
    return [
        [
            [Repetition(number, *of, threads, ns[number - 1]) for ns in cache.rounds]
            for number, of in enumerate(tests, 1)
        ]
        for cache in outputs.caches
    ]
