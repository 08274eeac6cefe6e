"""Logits with a LoRA adapter are the unpatched library's to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import read_events
from tests.kit.adapters import write_adapter
from tests.kit.native_kit import DEMO
from tests.recording.test_adapters import logits

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two of them for the demo model, the second of another rank and without an alpha."""
    directory = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(directory / "one.gguf", DEMO),
        write_adapter(directory / "two.gguf", DEMO, rank=4, alpha=0, roles=("ffn_up",), seed=2),
    ]


@pytest.mark.parametrize("level", ["minimal", "detailed", "verbose"])
def test_logits_with_an_adapter_are_the_unpatched_librarys(
    level: str, adapters: list[Path], tmp_path: Path
) -> None:
    words = ("--lora", adapters[0], "--scale", 0.5)
    plain = logits(tmp_path / "plain.npz", DEMO, *words, unpatched=True)
    recording = ("--level", level, "--log", tmp_path / "a.log")
    recorded = logits(tmp_path / "recorded.npz", DEMO, *words, *recording)
    assert len(read_events(tmp_path / "a.log", "adapters")) == 1
    assert [of.tobytes() for of in recorded] == [of.tobytes() for of in plain]
