"""Follows a log in a thread of its own and hands out frames to any number of viewers.

Invariant: a frame is made once and kept for a while, and each viewer asks for the one after its
last. So a slow viewer costs nothing: it gets a key frame in place of what it missed. `frame_after`
never waits; only the key frame, and `look`, wait for the state.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import msgspec

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.converters.live.frames import FrameMaker
from llamacpp_instr.converters.live.state import LiveState
from llamacpp_instr.log.ended_requests import Ended, EndedRequests
from llamacpp_instr.log.resolve import Resolver
from llamacpp_instr.log.runs import FollowedLog

FRAME_S = 0.1
QUIET_S = 1.0
"""the same while nothing happens, because times still advance"""
KEPT = 100
"""frames, those of ten seconds"""

T = TypeVar("T")
EndedIn: TypeAlias = Callable[[Resolver], Ended]
"""makes the receiver of the requests that end in the log of a resolver"""


class LiveSession:
    """The state of a followed log and its latest frames.

    `problem` is why following ended early, None if it did not. What `ended` makes is called in the
    thread that follows.
    """

    def __init__(self, log: FollowedLog, ended: EndedIn | None = None) -> None:
        self.problem: str | None = None
        self._log = log
        self._state = LiveState()
        refs = self._state.refs
        self._ended = EndedRequests(refs, ended(refs)) if ended else None
        self._moved = time.monotonic_ns()
        """when the latest event came"""
        self._frames = FrameMaker(self._state)
        self._lock = threading.Lock()
        """for the state and the maker of its frames"""
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._latest = 0
        """the number of the last frame"""
        self.over: str | None = None
        """why following ended, once the last frame was made: `closed`, `not closed` or a problem;
        None before"""
        self._kept_lock = threading.Lock()
        self._listeners: list[Callable[[], object]] = []
        self._reader = threading.Thread(target=self._read, name="follow", daemon=True)
        self._maker = threading.Thread(target=self._make, name="frames", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._reader.start()
        self._maker.start()

    def join(self) -> None:
        """Wait until reading has ended; stop the log first."""
        self._reader.join()
        self._maker.join()

    @property
    def is_catching_up(self) -> bool:
        """Whether it has not yet seen the end of what was written."""
        return self._log.is_catching_up

    def listen(self, listener: Callable[[], object]) -> None:
        """Call `listener` after every frame, in another thread."""
        self._listeners.append(listener)

    def look(self, at: Callable[[LiveState], T]) -> T:
        """What `at` returns for the state, while nothing changes it."""
        with self._lock:
            self._update_idle()
            return at(self._state)

    def frame_after(self, n: int) -> tuple[int, bytes] | None:
        """The frame after the `n`-th, with its number; None if there is none yet."""
        with self._kept_lock:
            first = self._latest + 1 - len(self._kept)
            return self._kept[n + 1 - first] if first <= n + 1 <= self._latest else None

    def is_behind(self, n: int) -> bool:
        """Whether a viewer whose last frame is the `n`-th needs a key frame: it has none (-1), the
        next one is no longer kept, or it came from another server."""
        with self._kept_lock:
            return not self._latest - len(self._kept) <= n <= self._latest

    def key_frame(self, after: int) -> tuple[int, bytes]:
        """A frame that stands for all up to the last one, with its number; `lost` in it is the
        number of frames since that of a viewer."""
        with self._lock:
            self._update_idle()
            latest = self._frames.n
            lost = latest - after if 0 <= after < latest else 0
            key = self._frames.key_frame(self.is_catching_up)
            return latest, msgspec.json.encode({**key, "over": self.over, "lost": lost})

    def _update_idle(self) -> None:
        waits = self._reader.is_alive() and not self.is_catching_up
        self._state.idle = time.monotonic_ns() - self._moved if waits else 0

    def _read(self) -> None:
        state = self._state
        try:
            for _, event in state.refs.follow(self._log, lenient=True):
                take = state.takers.get(type(event))
                with self._lock:
                    before = state.latest
                    state.n_events += 1
                    if take is not None:
                        take(event)
                    if state.latest != before:
                        self._moved = time.monotonic_ns()
                if self._ended and (take := self._ended.takers.get(type(event))):
                    take(event)
        except (LogError, OverflowError) as error:
            self.problem = str(error)
        if self._ended and not self._log.is_stopped:
            self._ended.finish()
        with self._lock:
            state.finish()

    def _make(self) -> None:
        """A frame every FRAME_S if something is new, else every QUIET_S, and the last one."""
        seen, made = -1, 0.0
        while True:
            reads = self._reader.is_alive()
            quiet = time.monotonic() - made > QUIET_S
            if self._state.n_events != seen or quiet or not reads:
                made = time.monotonic()
                with self._lock:
                    self._update_idle()
                    seen = self._state.n_events
                    frame = self._frames.next_frame(self.is_catching_up)
                    frame["over"] = None if reads else self._why()
                    data = msgspec.json.encode(frame)
                    with self._kept_lock:
                        self.over = frame["over"]
                        self._latest = self._frames.n
                        self._kept.append((self._latest, data))
                for listener in list(self._listeners):
                    listener()
            if not reads:
                return
            self._reader.join(FRAME_S)

    def _why(self) -> str:
        if self.problem:
            return self.problem
        end = self._log.end
        return "closed" if end is not None and end.state == "closed" else "not closed"
