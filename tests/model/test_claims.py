"""Claims of a model file take no memory, and a context must fit into the machine's memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from llamacpp_instr.base import machine
from llamacpp_instr.recording.memory.plan import MAX_CTX
from tests.conftest import Instr, assert_refused
from tests.kit.sparse_models import write_sparse_llama


@pytest.mark.native
def test_a_context_that_the_machine_cannot_hold_is_refused(instr: Instr, tmp_path: Path) -> None:
    """Terabytes, for a file that is a hole; the model is not loaded, and no log remains."""
    model = write_sparse_llama(tmp_path / "large.gguf", layers=128, width=4096, feed_forward=4096)
    ctx = MAX_CTX // 32
    assert_refused(
        instr("run", model, "-p", "a", "--ctx", ctx),
        "large.gguf needs 2,",
        "cache 2,199.0 GB",
        "this machine has",
        "a smaller context needs less",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["large.gguf"]
    comparison = instr("quality", model, model, "--only", "outputs", "--ctx", ctx)
    assert_refused(comparison, "this machine has")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_machines_memory_is_what_the_system_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_LIMITS", ())
    swaps = [line.split() for line in Path("/proc/swaps").read_text().splitlines()[1:]]
    swap = sum(int(columns[2]) << 10 for columns in swaps)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.machine_memory() == memory + swap

    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_LIMITS", (limit, tmp_path / "of another version"))
    for content, expected in (("max\n", memory + swap), ("65536\n", 65536), (f"{1 << 63}\n", None)):
        limit.write_text(content)
        assert machine.machine_memory() == (expected or memory + swap)
