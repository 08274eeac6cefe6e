"""The ubatches of a batch."""

from __future__ import annotations

from collections.abc import Sequence


def split(
    parts: Sequence[tuple[int, int]], ubatch: int, unified: bool
) -> list[list[tuple[int, int]]]:
    """The ubatches of a batch, which has these slots and numbers of tokens, in order; each as the
    numbers of its slots in `parts`, and their tokens."""
    left = [n for _, n in parts]
    found: list[list[tuple[int, int]]] = []
    if unified:
        room = 0
        for i, n in enumerate(left):
            while n:
                if not room:
                    found.append([])
                    room = ubatch
                some = min(n, room)
                found[-1].append((i, some))
                n, room = n - some, room - some
        return found
    while True:
        chosen: list[int] = []
        for i, n in enumerate(left):
            if n and (not chosen or parts[i][0] == parts[chosen[-1]][0] + 1):
                chosen.append(i)
                if len(chosen) > ubatch:
                    break
        if not chosen:
            return found
        each = min(min(left[i] for i in chosen), max(1, ubatch // len(chosen)))
        for i in chosen:
            left[i] -= each
        found.append([(i, each) for i in chosen])
