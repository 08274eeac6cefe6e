"""The model of every architecture that upstream writes passes our checks."""

from __future__ import annotations

import pytest

from llamacpp_instr.model.header import read_header
from llamacpp_instr.model.hyper_parameters import check_hyper_parameters
from tests.kit.native_kit import random_models

pytestmark = pytest.mark.native


def test_every_architecture_that_upstream_writes_passes() -> None:
    paths = sorted(random_models().glob("*.gguf"))
    assert len(paths) > 100
    for path in paths:
        check_hyper_parameters(path, read_header(path))
