"""`instr diff` of a log with a valid one, both ways, with itself, and in a trend."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from converters.analyses.diff import VIEWS, compute_diff
from converters.analyses.diff.sides import KEYS
from converters.analyses.diff.trend import compute_trend
from llamacpp_instr.errors import InstrError
from llamacpp_instr.log.session import Session, load_session
from tests.fuzz.guard import check_message, check_reports

KIND = "log"
SOUND = Path(__file__).parent.parent / "corpus" / "log" / "seed-detailed.log"


def attempt(path: Path) -> None:
    session = load_session(path)
    for a, b in ((session, session), (session, _sound()), (_sound(), session)):
        for view in (None, *VIEWS):
            try:
                found = compute_diff(a, b, view)
                check_reports(found.reports)
                found.slower_by(0.0)
            except InstrError as error:
                check_message(error)
    for view in (None, *KEYS):
        try:
            found = compute_trend([[_sound()], [session], [_sound()]], view)
            check_reports(found.reports)
        except InstrError as error:
            check_message(error)


@cache
def _sound() -> Session:
    return load_session(SOUND)
