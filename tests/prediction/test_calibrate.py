"""Costs scaled to a log of the same machine."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.prediction import calibrate as calibration
from llamacpp_instr.prediction.calibrate import OWN_ERROR, calibrated, drawn, scaled
from llamacpp_instr.prediction.fit import samples
from llamacpp_instr.prediction.model import Features, Other, Product, costs_of
from llamacpp_instr.prediction.probe.file import KernelModel, probe_json, read_probe
from tests.conftest import Instr, assert_refused
from tests.kit.made_machine import made_machine
from tests.kit.native_kit import DEMO
from tests.kit.nursery import Nursery
from tests.kit.reports import session_of
from tests.kit.sketched_log import Sketch


def machine(spread: float = 10.0) -> KernelModel:
    """By default one that knows nothing for sure, so that a log counts in full."""
    model = made_machine().kernel_model
    assert model is not None
    overheads = [replace(of, spread=spread) for of in model.overheads]
    return KernelModel(model.architecture, model.products, model.streams, model.others, overheads)


def session_with(tmp_path: Path, product: float, add: float, late: int = 0) -> Session:
    """Computes of a product and an ADD, slower than the machine by these factors; `late` of five
    steps take four times as long."""
    sketch = Sketch()
    for _ in range(5):
        sketch.step(900_000, ops=([1, 1], [0, 0]))
    (sample,) = samples(session_of(tmp_path / "plain.log", sketch.events))
    ns = costs_of(sample.features, machine(), 1).ns * [product, add]
    ops = [round(1e6 * of) for of in ns]
    sketch = Sketch()
    for i in range(5):
        sketch.step(sum(ops) * (4 if i >= 5 - late else 1), ops=(ops, [0, 0]))
    return session_of(tmp_path / "slow.log", sketch.events)


def test_each_kind_of_kernel_gets_its_factor(tmp_path: Path) -> None:
    factors = calibrated(machine(), session_with(tmp_path, 1.5, 0.5))[1]
    assert factors == pytest.approx({"decode": 1.5e6, "small": 0.5e6}, rel=2e-3)


def test_computing_and_reading_of_a_decode_have_their_own_factors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on two CPUs that are nearer to each other: less waiting, and less bandwidth."""
    (sample,) = samples(session_with(tmp_path, 1.0, 1.0))
    sizes = [1e3] * 200 + [1e5] * 20 + [3e6]
    products: list[Product | Other] = [
        Product("F16", False, False, 1, n / 2, 100.0, n, n / 1000) for n in sizes
    ]
    known = Features(products, 1e8)
    slower = scaled(machine(), {"decode": 0.7, "reading": 1.4})
    ns = costs_of(known, slower, 1).ns
    real = dataclasses.replace(sample, features=known, ns=ns, steps=np.full(5, ns.sum()))
    monkeypatch.setattr(calibration, "samples", lambda _session: [real])
    found = calibrated(machine(), session_with(tmp_path, 1.0, 1.0))[1]
    assert found["decode"] == pytest.approx(0.7, rel=0.02)
    assert found["reading"] == pytest.approx(1.4, rel=0.02)


def test_the_surer_the_probe_the_less_a_small_deviation_counts() -> None:
    """As sure as one model is like another: half, in logarithms."""
    assert drawn(0.05, OWN_ERROR) == pytest.approx(0.025)
    assert drawn(0.05, 0.01) < 0.025 < drawn(0.05, 0.3) < 0.05
    assert drawn(-0.05, 0.3) == -drawn(0.05, 0.3)


def test_a_machine_that_is_far_from_the_probe_counts_in_full(tmp_path: Path) -> None:
    """Beside a busy process, two threads take three times as long: no error of a sure probe."""
    assert math.exp(drawn(math.log(3), 0.03)) == pytest.approx(3, rel=0.01)
    factors = calibrated(machine(0.0), session_with(tmp_path, 1.5, 0.5))[1]
    assert factors == pytest.approx({"decode": 1.5e6, "small": 0.5e6}, rel=2e-3)


def test_the_spread_covers_steps_that_scatter(tmp_path: Path) -> None:
    """Two of the four steps that count are four times as late."""
    model, _ = calibrated(machine(0.01), session_with(tmp_path, 1.5, 0.5, late=2))
    one, two = (of.spread for of in model.overheads)
    assert 1.96 * one > math.log(4)
    assert two == 0.01, "the session has one thread"
    model, _ = calibrated(machine(0.3), session_with(tmp_path, 1.5, 0.5))
    assert {of.spread for of in model.overheads} == {0.3}, "never surer than before"


def test_scaled_costs_predict_scaled_times(tmp_path: Path) -> None:
    (sample,) = samples(session_with(tmp_path, 1.0, 1.0))
    model = machine()
    before = costs_of(sample.features, model, 1).ns
    slower = scaled(model, {"decode": 1.5, "small": 2.0, "prefill": 9.0, "attention": 9.0})
    inputs = 0.1 * sample.features.kernels[0].inputs  # type: ignore[union-attr]
    after = costs_of(sample.features, slower, 1).ns
    assert after[0] - inputs == pytest.approx(1.5 * (before[0] - inputs))
    assert after[1] == pytest.approx(2 * before[1])


def test_a_log_with_too_little_is_one_line(tmp_path: Path) -> None:
    sketch = Sketch()
    sketch.step(900, ops=([1, 1], [0, 0]))
    with pytest.raises(UsageError, match="lacks 3 computes of the same shape with their"):
        calibrated(machine(), session_of(tmp_path / "a.log", sketch.events))


@pytest.mark.native
def test_a_file_calibrated_by_a_session_predicts_that_session(instr: Instr, tmp_path: Path) -> None:
    """A machine that is far from this one predicts the demo's decodes as they were."""
    known = replace(made_machine(), cpu="", kernel_model=machine())
    file = tmp_path / "machine.json"
    file.write_bytes(probe_json(known))
    run = ("run", DEMO, "--prompt", "Once", "-n", 24, "--threads", 1, "--level", "detailed")
    assert instr(*run, "--log", "demo.log").returncode == 0
    done = instr("probe", "--calibrate", "demo.log", "-o", file)
    assert done.returncode == 0, done.stderr
    assert "products of a decode" in done.stdout
    model = read_probe(file).kernel_model
    assert model is not None
    decodes = [of for of in samples(load_session(tmp_path / "demo.log")) if of.tokens == 1]
    assert decodes
    for of in decodes:
        predicted = float(costs_of(of.features, model, 1).ns.sum())
        assert predicted == pytest.approx(float(of.ns.sum()), rel=0.15)


def test_a_log_of_another_processor_is_refused(instr: Instr, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_bytes(probe_json(made_machine()))
    log = session_with(tmp_path, 1.0, 1.0).path
    refused = instr("probe", "--calibrate", log, "-o", file)
    assert_refused(refused, "recorded on A CPU", "the probe is of a made CPU")


def test_without_a_probe_there_is_nothing_to_calibrate(
    nursery: Nursery, environment: dict[str, str], tmp_path: Path
) -> None:
    nowhere = environment | {"LLAMACPP_INSTR_CACHE": str(tmp_path / "empty")}
    done = nursery.run(["probe", "--calibrate", "a.log"], tmp_path, None, environment=nowhere)
    assert_refused(done, "this machine has not been measured")


def test_a_device_is_not_calibrated(instr: Instr) -> None:
    both = instr("probe", "--calibrate", "a.log", "--device", "Vulkan0")
    assert_refused(both, "--device and --calibrate exclude each other")
