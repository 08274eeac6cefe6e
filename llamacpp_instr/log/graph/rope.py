"""The angles by which ROPE turns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def yarn(params: Mapping[str, Any]) -> tuple[NDArray[np.float64], float]:
    """For each pair, the share of its frequency that is kept and not scaled by `freq_scale`; and
    the factor of the result. `params` are those of the op, by name. The formulas are those of
    `rope_yarn` and `ggml_rope_yarn_corr_dims` (ggml/src/ggml-cpu/ops.cpp, ggml/src/ggml.c)."""
    n, base = int(params["n_dims"]), float(params["freq_base"])
    pairs = np.arange(n // 2)
    if not params["ext_factor"]:
        return np.zeros(n // 2), float(params["attn_factor"])

    def dim(turns: float) -> float:
        return n * math.log(params["n_ctx_orig"] / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(0.0, math.floor(dim(params["beta_fast"])))
    high = min(n - 1.0, math.ceil(dim(params["beta_slow"])))
    ramp = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    magnitude = params["attn_factor"] * (1 + 0.1 * math.log(1 / params["freq_scale"]))
    return ramp * params["ext_factor"], magnitude
