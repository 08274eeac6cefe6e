"""`instr summary`, `instr stats` by every key, `instr tree` by every measure, `instr page`."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from converters.analyses.page import compute_page
from converters.analyses.stats import By, compute_stats
from converters.analyses.summary import compute_summary
from converters.analyses.tree import Measure, build_tree
from converters.report.page import render_page
from converters.report.tree import leaves, outline
from llamacpp_instr.errors import InstrError
from llamacpp_instr.log.session import load_session
from tests.fuzz.guard import check_figures, check_message, check_reports

KIND = "log"


def attempt(path: Path) -> None:
    session = load_session(path)
    check_reports(compute_summary(session))
    for by in (None, *get_args(By)):
        try:
            check_reports(compute_stats(session, by, None, True))
        except InstrError as error:
            check_message(error)
    for measure in get_args(Measure):
        try:
            tree = build_tree(session, measure)
        except InstrError as error:
            check_message(error)
        else:
            check_reports([outline(tree), leaves(tree)])
    check_figures(render_page(*compute_page([session])))
