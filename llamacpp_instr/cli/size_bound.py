"""The bound on the size of a trace: checked while it is written, from an estimate early on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, BinaryIO, cast

import click

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import OnProgress, notice
from llamacpp_instr.cli.options import bytes_of_size

MAX_TRACE = 10**9
"""bytes that the UI can open"""
SAMPLE, LARGE = 16_000_000, 100_000_000
"""bytes of a trace from which on its size is estimated, and those that are worth a line"""

max_size_option = click.option(
    "--max-size",
    metavar="SIZE",
    default="1GB",
    show_default=True,
    callback=bytes_of_size,
    help="Refuse to write a larger trace.",
)


class SizeBound:
    """Counts the bytes of a trace, and ends its writing with a UsageError as soon as it is, or will
    be, larger than `most`. The share of the log that was read predicts its final size, if the
    `whole` log is traced: of a range of steps only the bytes count."""

    def __init__(self, most: int, whole: bool, cure: str = "") -> None:
        self._most, self._whole, self._cure = most, whole, cure
        self._written = self._before = self._done = 0
        self._has_warned = False

    def seen_by(self, report: OnProgress) -> OnProgress:
        """The function for the progress of reading, which is passed on to `report`."""

        def on_progress(done: int, total: int) -> None:
            if done < self._done:
                self._before = self._written  # of the next log
            self._done = done
            of_this = self._written - self._before
            if self._whole and done and of_this > SAMPLE:
                self._expect(self._before + of_this * total // done)
            report(done, total)

        return on_progress

    def take(self, n_bytes: int) -> None:
        self._written += n_bytes
        if self._written > self._most:
            self._expect(self._written)

    def _expect(self, size: int) -> None:
        if size > self._most:
            allowed = math.ceil(1.2 * size / 1e9)
            cure = self._cure or f"choose steps with --steps A-B, or give --max-size {allowed}GB"
            raise UsageError(f"the trace would have about {size / 1e6:,.0f} MB; {cure}")
        if size > LARGE and not self._has_warned:
            self._has_warned = True
            notice(f"the trace will have about {size / 1e6:,.0f} MB")

    def counted(self, file: BinaryIO) -> BinaryIO:
        """The file, whose bytes count."""
        return cast(BinaryIO, _Counted(file, self.take))


class _Counted:
    def __init__(self, file: BinaryIO, take: Callable[[int], None]) -> None:
        self._file, self._take = file, take
        self.flush = file.flush

    def write(self, data: Any) -> int:
        self._take(len(data))
        return self._file.write(data)
