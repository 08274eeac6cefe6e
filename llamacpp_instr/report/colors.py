"""Scales of colours: amounts that differ tenfold are placed by their logarithms.

Invariant: one large amount does not hide the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float64 = NDArray[np.float64]


def placed(amounts: Float64, known: Float64) -> Float64:
    """Where amounts lie from 0 to 1, on the scale that the positive ones of `known` define."""
    import numpy as np

    ends = _ends(known)
    share = amounts / max(float(known.max(initial=0)), 1e-30)
    if ends is not None:
        share = np.log(np.maximum(amounts, ends[0]) / ends[0]) / np.log(ends[1] / ends[0])
    return np.minimum(share, 1)


def norm_of(cells: Float64) -> Any:
    """The same scale for matplotlib; None is its own, which is linear. Zero has no colour on a
    logarithmic one."""
    import numpy as np
    from matplotlib.colors import LogNorm

    ends = _ends(cells[np.isfinite(cells)])
    return None if ends is None else LogNorm(*ends)


def _ends(known: Float64) -> tuple[float, float] | None:
    """The smallest and the largest positive amount, if they differ tenfold and none is negative."""
    positive = known[known > 0]
    if not len(positive) or known.min() < 0 or positive.max() <= 10 * positive.min():
        return None
    return float(positive.min()), float(positive.max())
