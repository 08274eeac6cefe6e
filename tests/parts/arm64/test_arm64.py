"""A session that was recorded on an emulated arm64 processor: `make test-all PARTS=arm64`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from llamacpp_instr.converters.analyses.findings import Facts, no_interleaved_kernel
from llamacpp_instr.log import schema
from llamacpp_instr.log.check import check_log
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.session import load_session
from llamacpp_instr.log.steps import Account, counted_steps
from tests.kit.native_kit import DEMO
from tests.kit.programs import native_program, run_python

pytestmark = pytest.mark.native

DECODES = 20


def recorded(place: Path, model: Path, n_decodes: int) -> tuple[Path, list[int]]:
    """A log, and how long its caller waited for each decode, in ns."""
    log, program = place / "session.log", native_program("decode_times", place)
    command = [program, model, log, "2", str(n_decodes)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return log, [int(line) for line in printed.split()]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    return recorded(tmp_path_factory.mktemp("arm64"), DEMO, DECODES)


def test_its_log_is_clean_and_its_clock_is_arms_counter(session: tuple[Path, list[int]]) -> None:
    log, _ = session
    assert list(check_log(log)) == []
    start = next(e for _, e in read_events(log) if isinstance(e, schema.SessionStart))
    assert start.clock == "cntvct"
    assert start.tick > 0
    assert start.host.os.endswith("aarch64")
    assert {"NEON", "DOTPROD"} <= set(start.host.features)


def test_a_step_takes_no_longer_than_its_caller_waits(session: tuple[Path, list[int]]) -> None:
    log, waited = session
    events = [event for _, event in read_events(log)]
    spans = {e.step: 0 for e in events if isinstance(e, schema.StepEnd)}
    for e in events:
        if isinstance(e, schema.StepEnd):
            spans[e.step] += e.prepare + e.readback + e.recorder
        elif isinstance(e, schema.Compute):
            spans[e.step] += e.apply + e.build + e.alloc + e.inputs + e.dur
    assert len(spans) == len(waited) == DECODES + 1
    assert all(0 < spans[step] <= ns for step, ns in enumerate(waited))


def test_interleaved_weights_are_those_of_arm_and_others_are_found(tmp_path: Path) -> None:
    """x86 interleaves neither Q8_0 nor Q6_K."""
    quantize = """
        import sys
        from pathlib import Path
        from llamacpp_instr.lab.quantize.plan import QuantizeOptions
        from llamacpp_instr.model.file import load_model_file
        from llamacpp_instr.model.types import BY_NAME
        from tests.kit.quantize_kit import quantize_model
        types = [("attn_output", BY_NAME["Q8_0"]), ("attn_q", BY_NAME["Q6_K"])]
        types += [("ffn_down", BY_NAME["Q4_1"])]
        model, into = map(Path, sys.argv[1:])
        options = QuantizeOptions(pure=True, tensor_types=types)
        quantize_model(load_model_file(model), "Q5_0", into, options)"""
    ours = {name: of for name, of in os.environ.items() if name != "LLAMA_CPP_LIB_PATH"}
    model = tmp_path / "mixed.gguf"
    run_python(quantize, DEMO, model, check=True, env=ours)
    log, _ = recorded(tmp_path, model, 3)
    tensors = load_session(log).tensors
    interleaved = {of.type for of in tensors if of.buffer == "CPU_REPACK"}
    assert interleaved == {"q8_0", "q6_K"}
    assert {"q5_0", "q4_1"} <= {of.type for of in tensors if of.buffer != "CPU_REPACK"}
    facts = Facts(Account(load_session(log), counted_steps(load_session(log))[0]))
    what, share, advice = no_interleaved_kernel(facts) or ("", 0.0, "")
    assert what.startswith("Weights of q5_0 have no interleaved kernel on this machine; q6_K, q8_0")
    assert share > 0.2
    assert "to Q6_K and compare" in advice
