"""The scalars of a session as TensorBoard's event file.

A file of events is a sequence of records, each a protobuf message `Event`; tensorboardX writes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Scalars:
    """An event file that is being written."""

    def __init__(self, path: Path, wall: int) -> None:
        """`wall` is the session's begin in ns since 1970."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import RecordWriter

        self._event, self._summary, self._wall = Event, Summary, wall
        self._file: Any = RecordWriter(str(path))
        self._write(Event(wall_time=wall / 1e9, file_version="brain.Event:2"))

    def add(self, name: str, value: float, step: int, t: int) -> None:
        """A value at `t` ns after the session's begin."""
        value_ = self._summary.Value(tag=name, simple_value=value)
        self._write(
            self._event(
                wall_time=(self._wall + t) / 1e9,
                step=step,
                summary=self._summary(value=[value_]),
            )
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        self._file.write(event.SerializeToString())
