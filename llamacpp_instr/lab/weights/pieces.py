"""The stored bytes of tensors, piece by piece, and the threads that work on them.

Invariant: memory is bounded however large a model is: a part of a piece is read when a thread comes
to it, and only a few tensors are in progress at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.lab.weights.layout import Bytes
from llamacpp_instr.model.file import Weight

PIECE = 1 << 22
"""elements that a thread processes in one task: whole chunks"""

Part = TypeVar("Part")
Whole = TypeVar("Whole")
Files: TypeAlias = "Mapping[Path, OpenFile]"


@dataclass(frozen=True)
class Job(Generic[Part, Whole]):
    """A tensor: its pieces, which may be computed at once, and what joins them in order."""

    n_bytes: int
    pieces: Sequence[Callable[[], Part]]
    join: Callable[[list[Part]], Whole]


def work(
    jobs: Sequence[Job[Part, Whole]], threads: int, on_progress: OnProgress | None = None
) -> Iterator[Whole]:
    """What the jobs joined, in order; `threads` pieces are computed at once. `on_progress` gets
    (bytes read, bytes to read). No new piece is started after an error or Ctrl-C."""
    total = sum(job.n_bytes for job in jobs)
    done = 0
    queue: deque[tuple[int, list[Future[Part]], Future[Whole]]] = deque()
    todo = iter(jobs)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="weights")
    try:
        while True:
            while len(queue) <= threads and (job := next(todo, None)):
                pieces = [pool.submit(piece) for piece in job.pieces]
                # waits for its pieces, which were submitted earlier: threads are at work on them
                whole = pool.submit(_join, job.join, pieces)
                queue.append((job.n_bytes, pieces, whole))
            if not queue:
                return
            n_bytes, pieces, whole = queue.popleft()
            for i, piece in enumerate(pieces):
                piece.result()
                if on_progress:
                    on_progress(done + n_bytes * (i + 1) // len(pieces), total)
            done += n_bytes
            yield whole.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _join(join: Callable[[list[Part]], Whole], pieces: list[Future[Part]]) -> Whole:
    return join([piece.result() for piece in pieces])


class OpenFile:
    """A file that several threads read.

    It is not mapped: a page of a map that is not in the file any more would end the process.
    """

    def __init__(self, path: Path) -> None:
        """Raises UsageError if it cannot be read."""
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
        self._lock = threading.Lock()

    def read(self, begin: int, size: int) -> Bytes:
        """(size,) the bytes from `begin` on, fewer at the end of the file."""
        with self._lock:
            self._file.seek(begin)
            return np.frombuffer(self._file.read(size), np.uint8)


def open_files(paths: Iterable[Path]) -> Files:
    """The files, which are closed with the last reference to them. Raises UsageError if one cannot
    be read."""
    return {path: OpenFile(path) for path in paths}


def read_stored(files: Files, weight: Weight, start: int, end: int) -> Bytes:
    """The stored bytes of elements `start` to `end`. Raises UsageError if the file became
    shorter."""
    size = weight.type.row_bytes(end - start)
    data = files[weight.path].read(weight.offset + weight.type.row_bytes(start), size)
    if data.size < size:
        raise UsageError(f"{weight.path} became shorter while it was read")
    return data
