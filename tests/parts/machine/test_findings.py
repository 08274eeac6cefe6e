"""Findings fire where a real session provokes them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from llamacpp_instr.converters.exports.tables import load_tables
from llamacpp_instr.log.session import load_session
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.prediction.probe.file import Bandwidth, read_probe
from llamacpp_instr.report.report import shown
from tests.analyses.test_findings import causes
from tests.kit.made_probe import probe_of_caches
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.provoke import KINDS

OTHERS = {"disturbed-machine", "waiting-threads", "slow-threads"}
"""what other tests on the same machine may really cause"""
TIMED = {"slow-application", "cold-start", "waiting-threads", "costly-sampling"}
"""a thread without a CPU looks the same, so a disturbed machine hides these"""
REPACKED = {"held-twice", "no-interleaved-kernel"}


def provoke(kind: str, log: Path) -> str:
    """Records a session, and returns what the program printed. OpenMP's threads spin while they
    wait, as they do by default: one that sleeps also waits for its own CPU."""
    command = [sys.executable, "-m", "tests.kit.provoke", kind, str(DEMO), str(log)]
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.native
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"memory-bound"}))
def test_a_finding_fires_where_it_was_provoked(kind: str, tmp_path: Path) -> None:
    log = tmp_path / "provoked.log"
    # other work may also take the first thread's CPU
    for _ in range(3 if kind == "slow-threads" else 1):
        printed = provoke(kind, log)
        session = load_session(log)
        found = causes(session, probe_of_caches(session.start.host.cpu))
        if kind in found:
            break
    if kind in TIMED and "disturbed-machine" in found:
        return
    assert found.keys() - OTHERS <= {kind}
    assert kind in {*found, "nothing"}
    if kind == "held-twice":
        repacked = sum(t.bytes for t in session.tensors if t.buffer == "CPU_REPACK")
        in_place = sum(t.bytes for t in session.tensors if t.buffer == "CPU_Mapped")
        assert shown(repacked, "bytes") in found[kind].what
        assert 0.8 * repacked < int(printed) - in_place < 1.05 * repacked, "what Linux counts"


@pytest.mark.native
def test_a_decode_is_bound_by_memory_at_a_share_of_the_measured_bandwidth(tmp_path: Path) -> None:
    """The share follows from the bytes of the weights in the file, which the kernels of each decode
    read, and the time of these kernels. The roof is the one measured on this machine, or one made
    from the rate, so that the result does not depend on the machine."""
    log = tmp_path / "provoked.log"
    provoke("memory-bound", log)
    weights = load_model_file(log.with_suffix(".gguf")).weights
    read = sum(w.n_bytes for w in weights if w.name != "token_embd.weight")
    ops = load_tables(log).ops
    ops = ops[ops.phase == "decode"]
    rate = read * ops["compute"].nunique() / int(ops.dur.sum()) * 1e9

    session = load_session(log)
    measured = replace(read_probe(log.with_suffix(".probe")), load=0.0)
    for roof in (measured.bandwidth_of(1, read).bytes_per_second, rate / 0.73, rate / 0.67):
        found = causes(session, replace(measured, bandwidth=[Bandwidth(1, read, roof)]))
        if abs(rate / roof - 0.7) > 0.02:
            assert ("memory-bound" in found) is (rate / roof > 0.7)
        if "memory-bound" in found:
            (percent,) = re.findall(r"(\d+) %", found["memory-bound"].what)
            assert int(percent) == pytest.approx(100 * rate / roof, abs=2, rel=0.02)
    assert "memory-bound" not in causes(session)
    low = replace(measured, bandwidth=[Bandwidth(1, read, rate)])
    assert "`instr quality`" in causes(session, low)["memory-bound"].advice, "fewer bits lose some"
    assert "memory-bound" not in causes(session, replace(low, cpu="another"))
    assert "memory-bound" not in causes(session, replace(low, load=measured.cores * 0.6))
