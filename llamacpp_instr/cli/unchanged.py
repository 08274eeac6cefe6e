"""Runs a model again without the changes that a debugger made, to compare both continuations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamacpp_instr.debugger.collected import CollectedLogits
    from llamacpp_instr.debugger.comparison import Comparison
    from llamacpp_instr.llama.interrupt import Interrupt
    from llamacpp_instr.run.session import RunOptions


def compare_with_unchanged(
    options: RunOptions, log: Path, changed: CollectedLogits, interrupt: Interrupt | None = None
) -> tuple[Comparison, dict[int, str]]:
    """Both continuations token by token, and the texts of their tokens; `log` and `changed` are of
    the run with changes. Raises what `run` raises."""
    import io
    import tempfile
    from dataclasses import replace

    import numpy as np

    from llamacpp_instr.debugger.collected import CollectedLogits
    from llamacpp_instr.debugger.comparison import Continuation, compare
    from llamacpp_instr.debugger.control import Debugger
    from llamacpp_instr.debugger.stop import Go
    from llamacpp_instr.log.reader import read_events
    from llamacpp_instr.run.session import run
    from llamacpp_instr.schema import Token

    def continuation(log: Path, logits: CollectedLogits) -> Continuation:
        tokens = [event for _, event in read_events(log) if isinstance(event, Token)]
        texts.update({token.id: token.text for token in tokens})
        rows = np.array(logits.rows[: len(tokens)])
        return Continuation([token.id for token in tokens], rows)

    texts: dict[int, str] = {}
    logits = CollectedLogits()
    debugger = Debugger(lambda _stop: Go.ON)
    debugger.witnesses.append(logits)
    with tempfile.TemporaryDirectory() as directory:
        other = Path(directory) / "unchanged.log"
        run(replace(options, log=other), io.BytesIO(), lambda _line: None, debugger, interrupt)
        before = continuation(other, logits)
    return compare(before, continuation(log, changed)), texts
