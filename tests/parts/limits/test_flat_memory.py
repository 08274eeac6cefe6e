"""The memory of readers does not grow with the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp_instr.log import schema as s
from tests.kit.log_readers import ALL, write_coming_and_going
from tests.programs.flat_memory import peak_memory


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two logs, the second twice as large."""
    logs = [tmp_path_factory.mktemp("growing") / name for name in ("small.log", "large.log")]
    for log, n_bytes in zip(logs, (7 << 19, 7 << 20), strict=True):
        assert write_coming_and_going(log, n_bytes) > s.CONTEXTS_KEPT
    return logs


@pytest.mark.native
@pytest.mark.parametrize("reader", ALL)
def test_memory_is_flat_while_contexts_graphs_and_plans_come_and_go(
    reader: str, growing: list[Path]
) -> None:
    small, large = (peak_memory(reader, log) for log in growing)
    assert large - small < 3 << 20


@pytest.mark.native
@pytest.mark.parametrize("reader", ["Perfetto", "Chrome"])
def test_a_request_that_goes_on_keeps_little_of_each_step(reader: str, tmp_path: Path) -> None:
    peaks = []
    for n_steps in (6_000, 27_000):
        log = tmp_path / f"{n_steps}.log"
        assert write_coming_and_going(log, 1 << 20, n_steps, "minimal") == 1
        peaks.append(peak_memory(reader, log))
    assert peaks[1] - peaks[0] < 5 << 19
