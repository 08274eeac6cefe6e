"""Opens a range of a log that is being written in Perfetto's UI, as `instr view` does."""

from __future__ import annotations

import subprocess
import threading
from collections import deque
from contextlib import ExitStack
from pathlib import Path

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.system import python, temporary_directory
from llamacpp_instr.converters.live.live_session import LiveSession
from llamacpp_instr.log.runs import FollowedLog
from llamacpp_instr.report.perfetto_ui import FIRST_SIGHT, UiServer, find_ui

OPEN = 4
"""traces at once: the latest; a tab that shows an older one has read it"""

_CONVERT = "import sys; from llamacpp_instr.cli import main; main(sys.argv[1:])"


class RangeOpener(ExitStack):
    """Traces of ranges of a log, each with a server of Perfetto's UI, until the block ends.

    The log is only read, by a process of its own for each conversion.
    """

    def __init__(self, session: LiveSession, log: FollowedLog) -> None:
        super().__init__()
        self._session, self._log = session, log
        self._folder: Path | None = None
        self._files = self.enter_context(ExitStack())
        self._count = 0
        self._shown: deque[ExitStack] = deque()
        self._child: subprocess.Popen[str] | None = None
        self._closed = False
        self.callback(self._end)

    def _end(self) -> None:
        self._closed = True
        if self._child is not None:
            self._child.kill()
        while self._shown:
            self._shown.popleft().close()

    def open(self, first: int, last: int) -> str | Path:
        """The address at which Perfetto's UI shows these seconds of the session; the file of the
        trace if the UI is not installed. Raises UsageError if no step of that time is known,
        InstrError if the conversion fails."""
        trace = self._convert(first, last)
        self._shown.append(shown := ExitStack())
        if len(self._shown) > OPEN:
            self._shown.popleft().close()
        shown.callback(trace.unlink, missing_ok=True)
        try:
            server = UiServer(trace, find_ui())
        except UsageError:
            return trace
        serving = threading.Thread(target=server.run, daemon=True)
        serving.start()
        shown.callback(serving.join)
        shown.callback(server.stop)
        return server.opening(FIRST_SIGHT)

    def _convert(self, first: int, last: int) -> Path:
        start, steps = self._session.look(
            lambda state: (state.start, state.steps_between(first, last))
        )
        if start is None or steps is None:
            raise UsageError(f"no step ended from second {first} to {last}, or it is not kept")
        parts = self._log.parts_between(start.t + (first - 1) * 10**9, start.t + (last + 1) * 10**9)
        if not parts:
            raise UsageError(f"{self._log.path}: the part of that time does not exist any more")
        if self._folder is None:
            self._folder = self._files.enter_context(temporary_directory("instr-live-"))
        self._count += 1
        trace = self._folder / f"{first}-{last}-s.{self._count}.pftrace"
        words = ("to-perfetto", "--lenient", "--steps", f"{steps[0]}:{steps[1]}", "-o", str(trace))
        with subprocess.Popen(
            python(_CONVERT, *words, *map(str, parts)), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        ) as self._child:  # fmt: skip
            if self._closed:
                self._child.kill()
            _, errors = self._child.communicate()
        if self._child.returncode != 0:
            raise InstrError(f"the log was not converted: {errors.strip()[-500:]}")
        return trace
