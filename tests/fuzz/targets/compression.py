"""`instr memory` of a log."""

from __future__ import annotations

import contextlib
from pathlib import Path

from converters.analyses.memory import compression_reports, joined_tensors, shortened
from converters.analyses.memory.recorded import recorded_memory
from converters.analyses.stored_weights import recorded_file, stored_in_log
from llamacpp_instr.errors import UsageError
from llamacpp_instr.log.session import load_session
from tests.fuzz.guard import check_reports

KIND = "log"


def attempt(path: Path) -> None:
    session = load_session(path)
    models = []
    memory = recorded_memory(session)
    for model in session.models.values():
        with contextlib.suppress(UsageError):
            recorded_file(session, model)
        stored = stored_in_log(session, model, None)
        models.append(compression_reports(stored, memory.get(model.model, [])))
    for reports in models:
        check_reports(reports)
        check_reports(shortened(reports))
    if models:
        check_reports([joined_tensors(models)])
