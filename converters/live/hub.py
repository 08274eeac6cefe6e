"""Follows a log in a thread of its own and hands out frames to any number of viewers.

Invariant: a frame is made once and kept for a while, and each viewer asks for the one after its
last. So a slow viewer costs nothing: it gets a key frame in place of what it missed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from converters.live.frames import FrameMaker
from converters.live.state import LiveState
from llamacpp_instr.errors import LogError
from llamacpp_instr.log.follow import FollowedLog

FRAME_S = 0.1
KEPT = 100
"""frames, which are those of ten seconds"""

T = TypeVar("T")


class Hub:
    """The state of a followed log and its latest frames.

    `problem` is why following ended early, None if it did not.
    """

    def __init__(self, log: FollowedLog) -> None:
        self.problem: str | None = None
        self._log = log
        self._state = LiveState()
        self._frames = FrameMaker(self._state)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._over: str | None = None
        """why following ended, in the last frame"""
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="follow", daemon=True)
        self._maker = threading.Thread(target=self._make, name="frames", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._reader.start()
        self._maker.start()

    def join(self) -> None:
        """Wait until nothing is read any more; stop the log before."""
        self._reader.join()
        self._maker.join()

    @property
    def is_over(self) -> bool:
        """Whether the log has ended and its last frame was made."""
        return not self._maker.is_alive()

    def look(self, at: Callable[[LiveState], T]) -> T:
        """What `at` returns for the state, while nothing changes it."""
        with self._lock:
            return at(self._state)

    def frame_after(self, n: int) -> tuple[int, bytes] | None:
        """The frame after the `n`-th, with its number; None if there is none yet. A viewer without
        frames (-1), and one that lost some, gets a key frame, which has the number `lost`."""
        with self._lock:
            latest = self._frames.n
            if n == latest:
                return None
            first = self._kept[0][0] if self._kept else latest + 1
            if first <= n + 1 <= latest:
                number, data = self._kept[n + 1 - first]
                return number, data
            lost = latest - n if 0 <= n < latest else 0
            key = self._frames.key_frame(self._log.is_late)
            return latest, _encode({**key, "over": self._over, "lost": lost})

    def _read(self) -> None:
        refs, takers = self._state.refs, self._state.takers
        try:
            for _, event in refs.follow(self._log, lenient=True):
                take = takers.get(type(event))
                with self._lock:
                    self._state.n_events += 1
                    if take is not None:
                        take(event)
        except (LogError, OverflowError) as error:
            self.problem = str(error)

    def _make(self) -> None:
        """A frame every FRAME_S, if something is new, and the last one."""
        seen = -1
        while True:
            reads = self._reader.is_alive()
            with self._lock:
                if self._state.n_events != seen or not reads:
                    seen = self._state.n_events
                    frame = self._frames.next_frame(self._log.is_late)
                    self._over = None if reads else self._why()
                    frame["over"] = self._over
                    self._kept.append((self._frames.n, _encode(frame)))
            if not reads:
                return
            self._reader.join(FRAME_S)

    def _why(self) -> str:
        if self.problem:
            return self.problem
        end = self._log.end
        return "closed" if end is not None and end.state == "closed" else "not closed"


def _encode(frame: object) -> bytes:
    return msgspec.json.encode(frame)
