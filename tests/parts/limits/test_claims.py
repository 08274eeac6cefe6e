"""Numbers that a model file claims take no memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.kit.native_kit import ROOT

# experts and attention with an index; recurrent; loops
ARCHITECTURES = ["minimax-m3-moe", "mamba2-dense", "hrm_text-dense"]


@pytest.mark.native
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_number_in_a_model_takes_no_memory(environment: dict[str, str]) -> None:
    """Every number of these architectures; `python -m tests.programs.claims` tests all of them."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.claims", "--quick", *ARCHITECTURES],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    claims = re.match(r"(\d[\d,]*) claims: .*; 0 findings", done.stdout)
    assert claims is not None, done.stdout
    assert int(claims[1].replace(",", "")) > 80 * len(ARCHITECTURES)
