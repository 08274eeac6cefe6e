"""Logits with a LoRA adapter are the unpatched library's to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import read_events
from tests.kit.native_kit import DEMO
from tests.recording.test_adapters import adapters, logits

__all__ = ["adapters"]  # fixtures

pytestmark = pytest.mark.native


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
