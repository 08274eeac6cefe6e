"""Work on the workers of a Dask scheduler, which see the same files under the same names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from llamacpp_instr.base.errors import UsageError, reason

Of = TypeVar("Of")
Result = TypeVar("Result")


def on_dask(address: str, function: Callable[[Of], Result], of: Sequence[Of]) -> Iterator[Result]:
    """Yields each result when it arrives. Raises UsageError if no scheduler answers at `address`,
    or if Dask is missing."""
    from distributed import Client, as_completed

    try:
        client: Any = Client(address, timeout=10)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(f"--dask {address}: no scheduler answers ({reason(error)})") from None
    with client:
        futures = client.map(function, of, pure=False)
        try:
            for future in as_completed(futures):  # type: ignore[no-untyped-call]
                yield future.result()
        finally:
            client.cancel(futures)
