"""What a context uses of its caches, against the bytes of their tensors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llamacpp_instr.converters.analyses.summary import compute_summary
from llamacpp_instr.log.session import load_session
from llamacpp_instr.report.report import shown
from tests.conftest import Instr, read_events
from tests.kit.native_kit import random_model
from tests.kit.reports import by_title


@pytest.mark.native
@pytest.mark.parametrize("name", ["llama-dense", "gemma3-dense", "falcon-h1-dense"])
def test_what_a_context_uses_is_the_sum_over_its_caches(instr: Instr, tmp_path: Path, name: str):
    """Against the caches' own tensors. With a sliding window, layers are in caches of two sizes;
    a recurrent state is in one of its own."""
    model = random_model(name)
    done = instr("run", model, "-p", "a" * 400, "-n", 90, "--ctx", 2048, "--log", "a.log")
    assert done.returncode == 0, done.stderr
    log = tmp_path / "a.log"
    leafs = {f["name"]: f for graph in read_events(log, "graph") for f in graph["leafs"]}
    wanted = 0.0
    for kv in {kv.get("cache", 0): kv for kv in read_events(log, "kv")}.values():
        recurrent = kv.get("kind") == "recurrent"
        own = [
            of["bytes"]
            for leaf, of in leafs.items()
            if re.match("cache_[rs]_l" if recurrent else "cache_[kv]_l", leaf)
            and (recurrent or of["ne"][1] == kv["size"])
        ]
        wanted += sum(own) / kv["size"] * kv["used"]
    memory = by_title(compute_summary(load_session(log)))["Memory"]
    assert memory.figures["bytes used of context 0"] == (wanted, "bytes")
    assert shown(wanted, "bytes") in " ".join(memory.notes)
