"""Ids that a log assigned, in memory that does not grow with them."""

from __future__ import annotations


class Numbers:
    """The ids that were assigned. They count up, so one range and a few others suffice."""

    def __init__(self) -> None:
        self._first = self._next = 0
        self._others: set[int] = set()

    def add(self, number: int) -> bool:
        """Whether it was not assigned before."""
        if number == self._next and not self._others:
            self._next += 1
            return True
        if number in self:
            return False
        if self._first == self._next:
            self._first = self._next = number  # a part of a rotated log does not begin at zero
        self._others.add(number)
        while self._next in self._others:
            self._others.remove(self._next)
            self._next += 1
        return True

    def __contains__(self, number: int) -> bool:
        return self._first <= number < self._next or number in self._others

    def __len__(self) -> int:
        return self._next - self._first + len(self._others)
