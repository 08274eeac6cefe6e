"""Arrays that were computed on request, up to a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeAlias

from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"


class Cache:
    """The arrays that were asked for last. Those who ask for one at the same time share its
    computation."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Future[Array]] = OrderedDict()
        self.n_bytes = 0

    def get(self, key: Hashable, compute: Callable[[], Array]) -> Array:
        """The array of `key`; `compute` makes it unless it is kept. An error is not kept."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                own = self._kept[key] = Future()
            else:
                self._kept.move_to_end(key)
        if found is not None:
            return found.result()
        try:
            array = compute()
        except BaseException as error:
            with self._lock:
                del self._kept[key]
            own.set_exception(error)
            raise
        own.set_result(array)
        with self._lock:
            self.n_bytes += array.nbytes
            done = [key for key, of in self._kept.items() if of.done() and of is not own]
            for key in done:
                if self.n_bytes <= self._max_bytes:
                    break
                self.n_bytes -= self._kept.pop(key).result().nbytes
        return array
