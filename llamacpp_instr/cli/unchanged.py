"""Runs a model again without the changes that a debugger made, to compare both continuations."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from llamacpp_instr.debugger.collected import CollectedLogits
from llamacpp_instr.debugger.comparison import Comparison, Continuation, compare
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.stop import Go
from llamacpp_instr.llama.interrupt import Interrupt
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.run.launch import Launched
from llamacpp_instr.run.session import RunOptions, run
from llamacpp_instr.schema import Token
from llamacpp_instr.temporary import temporary_directory

Compared = tuple[Comparison, dict[int, str]]
"""both continuations token by token, and the texts of their tokens"""


class ComparedRun:
    """A run that a debug adapter launches. After changes it runs again without them, and `show`
    gets the comparison; `is_changed` tells whether there were any."""

    def __init__(
        self,
        launched: Launched,
        debugger: Debugger,
        is_changed: Callable[[], bool],
        notice: Callable[[str], None],
        show: Callable[[Compared], None],
    ) -> None:
        self.stop_on_entry = launched.stop_on_entry
        self._launched, self._debugger = launched, debugger
        self._is_changed, self._notice, self._show = is_changed, notice, show
        self._interrupt = Interrupt()

    def run(self) -> None:
        """As `Launched.run`."""
        logits = CollectedLogits()
        self._debugger.witnesses.append(logits)
        self._launched.run()
        if self._is_changed() and self._debugger.go is not Go.QUIT:
            self._notice("running again without the changes, for comparison")
            options = self._launched.options
            assert options.log is not None
            self._show(compare_with_unchanged(options, options.log, logits, self._interrupt))

    def interrupt(self) -> None:
        """As `Launched.interrupt`."""
        self._launched.interrupt()
        self._interrupt.request()


def compare_with_unchanged(
    options: RunOptions, log: Path, changed: CollectedLogits, interrupt: Interrupt | None = None
) -> Compared:
    """The two continuations; `log` and `changed` are of the run with changes. Raises what `run`
    raises."""

    def continuation(log: Path, logits: CollectedLogits) -> Continuation:
        tokens = [event for _, event in read_events(log) if isinstance(event, Token)]
        texts.update({token.id: token.text for token in tokens})
        rows = np.array(logits.rows[: len(tokens)])
        return Continuation([token.id for token in tokens], rows)

    texts: dict[int, str] = {}
    logits = CollectedLogits()
    debugger = Debugger(lambda _stop: Go.ON)
    debugger.witnesses.append(logits)
    with temporary_directory("instr-unchanged-") as directory:
        other = directory / "unchanged.log"
        run(replace(options, log=other), io.BytesIO(), lambda _line: None, debugger, interrupt)
        before = continuation(other, logits)
    return compare(before, continuation(log, changed)), texts
