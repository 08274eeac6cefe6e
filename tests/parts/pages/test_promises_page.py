"""Figures of docs/explanation/promises.md that follow from the tests it names."""

from __future__ import annotations

import pytest

from tests.debugger import test_lens
from tests.kit.native_kit import ROOT, random_models
from tests.kit.quantized_kit import QUANTIZED_FILE_TYPES
from tests.memory import test_memory_plan as memory
from tests.parts.browser import test_perfetto_sql
from tests.parts.devices import test_devices
from tests.parts.limits import test_converter_faults as converters
from tests.parts.limits import test_faults
from tests.parts.unpatched import test_identity
from tests.parts.unpatched import test_values as values
from tests.recording import test_accounting, test_every_field

pytestmark = pytest.mark.native
N_ARCHITECTURES = 128
N_RUNS = len(test_identity.MODELS) * len(test_identity.THREADS) * len(test_identity.LEVELS)
N_KILLS = len(converters.COMMANDS) * converters.KILLS
N_SESSIONS = sum(name != "device" for name, _ in test_perfetto_sql.RECORDED)


@pytest.mark.parametrize(
    ("test", "figure"),
    [
        ("test_identity", f"{len(test_identity.MODELS)} models"),
        ("test_identity", f"{N_RUNS} runs"),
        ("test_faults", f"{test_faults.KILLS} processes killed"),
        ("test_every_field", f"{len(test_every_field.FIELDS)} fields"),
        ("test_accounting", f"{test_accounting.DECODES} decodes"),
        ("test_converter_faults", f"{len(converters.COMMANDS)} commands"),
        ("test_converter_faults", f"{N_KILLS} kills"),
        ("test_perfetto_sql", f"{N_SESSIONS} recorded sessions"),
        ("test_every_architecture", f"{N_ARCHITECTURES} architectures"),
        ("test_memory_plan", f"{len(memory.QUANTIZED_FILE_TYPES)} file types"),
        ("test_memory_plan", f"{len(memory.ARCHITECTURES)} architectures"),
        ("test_values", f"{len(values.ARCHITECTURES)} architectures"),
        ("test_values", f"{len(QUANTIZED_FILE_TYPES)} file types"),
        ("test_dry_graph", f"{N_ARCHITECTURES} architectures"),
        ("test_onnx", f"{N_ARCHITECTURES} architectures"),
        ("PARTS=devices", f"{len(test_devices.ARCHITECTURES)} architectures"),
        ("test_lens", f"{len(test_lens.ARCHITECTURES)} architectures"),
    ],
)
def test_a_figure_is_that_of_its_test(test: str, figure: str) -> None:
    page = (ROOT / "docs" / "explanation" / "promises.md").read_text(encoding="utf-8")
    assert any(test in line and figure in line for line in page.splitlines())


def test_upstream_has_as_many_architectures() -> None:
    assert len(list(random_models().glob("*.gguf"))) == N_ARCHITECTURES
