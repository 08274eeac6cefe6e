"""`instr probe` of this machine in about a second: fewer sizes, one type of weights, fewer runs."""

from __future__ import annotations

import pytest

from llamacpp_instr.prediction.probe import measure
from llamacpp_instr.prediction.probe.file import Probe


def short_probe(*sizes: int) -> Probe:
    """What was measured, with the bandwidth of `sizes` in MiB."""
    shorter = {"SECONDS": 0.0, "SIZES": sizes, "TYPES_OF_WEIGHTS": ("F16",), "TOKENS": (1,)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shorter.items():
            patch.setattr(measure, name, value)
        return measure.measure(lambda *_: None)
