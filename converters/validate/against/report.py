"""The table of a comparison with transformers."""

from __future__ import annotations

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.validate.against.compare import Comparison
from llamacpp_instr.converters.validate.report import Verdict
from llamacpp_instr.report.report import Cell, Column, Report


def judge_states(found: Comparison, bound: float, why: str) -> Verdict:
    """A row for each state, in the order of the compute. `why` says where the bound comes from."""
    rows: list[list[Cell]] = [
        [
            of.state,
            of.node,
            of.error,
            of.cosine,
            of.token,
            "ok" if of.error <= bound else "beyond",
        ]
        for of in found.states
    ]
    columns = [
        Column("state"),
        Column("node"),
        Column("relative error", "number"),
        Column("cosine", "cosine"),
        Column("worst token", "number"),
        Column("verdict"),
    ]
    table = Report("States of llama.cpp against transformers in float32", columns, rows)
    first = next((of for of in found.states if of.error > bound), None)
    table.notes += [
        f"They part at {first.state}: its error is the first beyond {bound:.4g} ({why})."
        if first
        else f"They agree: no error is beyond {bound:.4g} ({why}).",
        "relative error: the norm of the difference, divided by the norm of transformers' values;"
        " cosine: the lowest of a token; worst token: the one with the largest error, from 0.",
        f"Both find the same next token most probable after {found.same_top:,} of"
        f" {counted(found.n_tokens, 'token')}.",
    ]
    table.figures = {
        "bound": (bound, "number"),
        "parts at": (first.state if first else None, "text"),
        "tokens": (found.n_tokens, "count"),
        "same most probable": (found.same_top, "count"),
    }
    return Verdict([table], first is None)
