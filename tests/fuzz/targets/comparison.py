"""`instr compare` of two logs: one with a valid one, both ways."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from converters.analyses.compare import compute_comparison
from converters.analyses.compare.candidate import (
    Candidate,
    recorded_memory,
    recorded_model,
    short_names,
)
from converters.analyses.stored_weights import stored_in_log
from llamacpp_instr.log.session import Session, load_session
from tests.fuzz.guard import check_reports

KIND = "log"
SOUND = Path(__file__).parent.parent / "corpus" / "log" / "seed-verbose.log"


def attempt(path: Path) -> None:
    session = load_session(path)
    paths = [Path(recorded_model(of).path) for of in (session, _sound())]
    names = short_names(paths, [path, SOUND])
    candidates = [_candidate(name, of) for name, of in zip(names, (session, _sound()), strict=True)]
    for sides in (candidates, candidates[::-1]):
        check_reports(compute_comparison(sides, None, every_tensor=True))
        check_reports(compute_comparison(sides, None, every_tensor=False))


def _candidate(name: str, session: Session) -> Candidate:
    stored = stored_in_log(session, recorded_model(session), None)
    return Candidate(name, stored, None, [session], recorded_memory(session))


@cache
def _sound() -> Session:
    return load_session(SOUND)
