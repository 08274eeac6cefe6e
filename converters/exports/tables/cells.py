"""Columns of a DataFrame: words as numbers, integers that may be missing, rates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Int64 = NDArray[np.int64]


class Words:
    """Numbers for the words of one column, in the order of their first use; None is -1."""

    def __init__(self, words: Sequence[str] = ()) -> None:
        self._code: dict[str | None, int] = {word: i for i, word in enumerate(words)}

    def codes(self, words: Iterable[str | None]) -> NDArray[np.int32]:
        code = self._code
        return np.array(
            [-1 if word is None else code.setdefault(word, len(code)) for word in words], np.int32
        )

    def categorical(self, codes: NDArray[Any]) -> pd.Categorical:
        categories = pd.Index(list(self._code), dtype="object" if not self._code else None)
        return pd.Categorical.from_codes(codes, categories=categories)


def joined(pieces: Sequence[NDArray[Any]]) -> Int64:
    """The pieces joined; empty without any."""
    column: Int64 = np.concatenate([np.zeros(0, np.int64), *pieces])
    return column


def int64(values: Sequence[int]) -> Int64:
    return np.array(values, np.int64)


def rate(amount: NDArray[Any], by: NDArray[Any]) -> NDArray[np.float64]:
    """`amount / by`; NaN where either of them is 0 or `by` is negative."""
    known = (amount != 0) & (by > 0)
    rates: NDArray[np.float64] = np.full(len(by), np.nan)
    np.divide(amount, by, out=rates, where=known)
    return rates


def masked(values: Int64, missing: NDArray[np.bool_]) -> Any:
    """Integers that may be missing (pandas' Int64)."""
    return pd.arrays.IntegerArray(np.where(missing, 0, values), missing)


def optional(values: Sequence[int | None] | NDArray[Any]) -> Any:
    """Integers; None becomes a missing value."""
    missing = np.array([value is None for value in values], np.bool_)
    return masked(int64([value or 0 for value in values]), missing)


def text(values: Sequence[str | None] | NDArray[Any]) -> Any:
    return pd.array(list(values), dtype="string")
