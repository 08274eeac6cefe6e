"""`instr summary` and `instr stats`, by every key."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from converters.analyses.stats import By, compute_stats
from converters.analyses.summary import compute_summary
from llamacpp_instr.errors import InstrError
from llamacpp_instr.log.session import load_session
from tests.fuzz.guard import check_message, check_reports

KIND = "log"


def attempt(path: Path) -> None:
    session = load_session(path)
    check_reports(compute_summary(session))
    for by in (None, *get_args(By)):
        try:
            check_reports(compute_stats(session, by, None, True))
        except InstrError as error:
            check_message(error)
