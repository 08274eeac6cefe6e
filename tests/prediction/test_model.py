"""Times of kernels on a made machine, and costs that are fitted to its own times."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from msgspec.structs import replace

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.log.graph.kernels import cpu_plan
from llamacpp_instr.log.schema import Graph, Leaf, Nodes, Split
from llamacpp_instr.prediction.fit import (
    LEAST_SPREAD,
    OWN_ERROR,
    Sample,
    _fit_all,
    _fit_other,
    _fit_products,
    _Fitted,
    _Measured,
    _sizes,
    _split,
    fit,
)
from llamacpp_instr.prediction.model import (
    ONE,
    Features,
    Other,
    Product,
    _Costs,
    costs_of,
    kernel_model,
    predict_kernels,
)
from llamacpp_instr.prediction.probe.file import KernelModel, Probe, Stream, probe_json, read_probe
from tests.kit.made_machine import MB, TYPES, made_machine


def product_graph(width: int, rows: int, tokens: int = 1, type_: str = "f16") -> Graph:
    """A matrix product and an ADD of its result."""
    weight = Leaf(
        name="blk.0.ffn_up.weight", type=type_, ne=[width, rows], bytes=2 * width * rows, tensor=0
    )
    tokens_in = Leaf(name="inp", type="f32", ne=[width, tokens], bytes=4 * width * tokens)
    nodes = Nodes(
        name=["ffn_up-0", "l_out-0"],
        op=["MUL_MAT", "ADD"],
        layer=[0, 0],
        type=["f32", "f32"],
        ne=[[rows, tokens], [rows, tokens]],
        bytes=[4 * rows * tokens, 4 * rows * tokens],
        src=[[-1, -2], [0, 0]],
        buffer=[-1, -1],
        params=[[], []],
        exec=[1, 1],
    )
    return Graph(
        t=0, graph=0, ctx=0, uid=1, source="reserve", why="first", n_nodes=2, n_exec=2,
        splits=[Split(start=0, end=2, backend="CPU")], leafs=[weight, tokens_in], nodes=nodes,
    )  # fmt: skip


def total(probe: Probe, threads: int = 1, **shape: int) -> float:
    graph = product_graph(**shape)
    return float(predict_kernels(graph, cpu_plan(graph), probe, threads).ns.sum())


def made_model(threads: tuple[int, ...] = (1, 2)) -> KernelModel:
    model = made_machine(threads).kernel_model
    assert model is not None
    return model


def with_streams(probe: Probe, factor: float) -> Probe:
    model = probe.kernel_model
    assert model is not None
    streams = [Stream(s.threads, s.bytes, s.bytes_per_second * factor) for s in model.streams]
    return replace(probe, kernel_model=replace(model, streams=streams))


def test_twice_the_bandwidth_halves_what_memory_bounds() -> None:
    """64 MB at 10 GB/s and at 20; computing takes a tenth of that."""
    machine = made_machine()
    model = machine.kernel_model
    assert model is not None
    for product in model.products:
        product.ns_per_mac /= 50
    shape = {"width": 8192, "rows": 4096}
    before, after = total(machine, **shape), total(with_streams(machine, 2), **shape)
    assert after / before == pytest.approx(0.5, abs=0.01)


def test_a_product_that_computing_bounds_does_not_depend_on_the_bandwidth() -> None:
    machine = made_machine()
    shape = {"width": 256, "rows": 256, "tokens": 64}
    before, after = total(machine, **shape), total(with_streams(machine, 100), **shape)
    assert after / before == pytest.approx(1, abs=0.02)


def test_the_total_is_the_sum_of_the_kernels_and_of_the_step() -> None:
    graph = product_graph(1024, 1024)
    found = predict_kernels(graph, cpu_plan(graph), made_machine(), 2)
    ns, error = found.total()
    assert ns == pytest.approx(found.ns[0] + found.ns[1] + 20_000)
    parts = found.ns * found.spread
    assert error == pytest.approx(np.hypot(parts[0], parts[1]))


def test_an_unmeasured_type_is_predicted_from_another_and_named() -> None:
    graph = product_graph(1024, 1024, type_="iq1_s")
    found = predict_kernels(graph, cpu_plan(graph), made_machine(), 1)
    assert found.unknown == ["IQ1_S"]
    assert found.ns[0] > 0
    assert found.spread[0] == 0.5


@pytest.mark.parametrize(("measured", "threads"), [((1, 4), 2), ((1, 2), 4), ((2, 8), 6)])
def test_threads_that_were_not_measured_are_predicted_from_the_nearest(
    measured: tuple[int, ...], threads: int
) -> None:
    """The made machine computes and reads as many times faster as it has threads, and its barriers
    take as many times longer."""
    graph = product_graph(1024, 1024)
    plan = cpu_plan(graph)
    found = predict_kernels(graph, plan, made_machine(measured), threads)
    true = predict_kernels(graph, plan, made_machine((threads,)), threads)
    assert found.ns == pytest.approx(true.ns, rel=1e-6)
    assert found.step_ns == true.step_ns
    assert found.unknown == [f"{threads} threads"]
    assert true.unknown == []
    assert found.step_spread > 0.2, "half for each doubling"


def test_a_machine_measured_with_one_thread_computes_faster_with_more_but_reads_as_fast() -> None:
    one, two = (kernel_model(made_machine((1,)), n) for n in (1, 2))
    assert two.products[0].ns_per_mac == one.products[0].ns_per_mac / 2
    assert two.streams[0].bytes_per_second == one.streams[0].bytes_per_second
    with pytest.raises(UsageError, match=r"5,000 threads are too many; at most 1,024"):
        kernel_model(made_machine(), 5000)


def test_steps_of_models_that_deviate_as_a_whole_have_a_spread_of_their_own() -> None:
    """Every kernel of a model is slower or faster by the same factor, by 15 % on average."""
    of = made_samples(made_model(threads=(1,)))
    random = np.random.default_rng(2)
    factors = [float(np.exp(random.normal(0, 0.15))) for _ in range(6)]
    models = [[replace_times(sample, factor) for sample in of] for factor in factors]
    (overhead,) = fit(models, {}).overheads
    assert 0.1 < overhead.spread < 0.3
    (exact,) = fit([of] * 3, {}).overheads
    assert exact.spread == pytest.approx(OWN_ERROR, abs=0.01)


def test_the_spread_of_steps_comes_from_fits_that_lack_a_third_of_the_models() -> None:
    of = made_samples(made_model(threads=(1,)))
    models = [[replace_times(sample, factor) for sample in of] for factor in (1.0, 1.1, 0.8, 1.3)]
    flat = [sample for model in models for sample in model]
    whole = _fit_all(flat, {})
    errors, kernels = [], []
    for left in ((0, 3), (1,), (2,)):
        seen = [s for i, model in enumerate(models) if i not in left for s in model]
        others = _fit_all(seen, {}, spreads=False)
        for sample in (s for i in left for s in models[i]):
            errors.append(
                abs(np.log(sample.step_ns / costs_of(sample.features, others, 1).total()[0]))
            )
            ns, error = costs_of(sample.features, whole, 1).total()
            kernels.append(error / ns)
    wanted = ((1.4826 * np.median(errors)) ** 2 - np.median(kernels) ** 2) ** 0.5
    (overhead,) = fit(models, {}).overheads
    assert wanted > 0.1
    assert overhead.spread == pytest.approx(float(np.hypot(wanted, OWN_ERROR)), rel=1e-3)


def test_what_a_step_costs_beside_its_kernels_is_that_of_decodes() -> None:
    """A prefill has more to copy; one slow decode hardly moves it."""
    samples = made_samples(made_model(threads=(1,)))
    for i, sample in enumerate(samples):
        slow = sample.tokens > 1 or not i
        samples[i] = dataclasses.replace(sample, step_ns=sample.step_ns + 1e6 * slow)
    (overhead,) = fit([samples], {}).overheads
    assert overhead.step_ns == pytest.approx(20_000, rel=1e-3)


def test_equal_kernels_of_a_compute_count_once_with_their_median() -> None:
    one, other = (
        Other("ADD", 4.0, 8.0, 0.0, 0.0),
        Product("F16", False, False, 1, 4.0, 2.0, 8.0, 2.0),
    )
    kernels: list[Product | Other] = [one, other, one, one, other, one]
    ns = np.array([10.0, 5, 900, 14, 7, 12])
    sample = Sample(1, 1, 0, Features(kernels, 3.0), ns, 950.0, np.array([950.0]))
    products, others = _split([sample])
    assert [(m.kernel, m.working_set, m.ns) for m in products] == [(other, 3.0, 5.0)]
    assert others == {"ADD": [_Measured(one, 3.0, 12.0)]}


WARM = _Fitted([], np.array([1.0]), np.zeros(4))
"""one working set only, so that nothing is far away"""


def measured(kernels: Sequence[Other], times: Sequence[float]) -> list[_Measured[Other]]:
    return [_Measured(of, 1.0, ns) for of, ns in zip(kernels, times, strict=True)]


def test_the_spread_of_an_op_comes_from_kernels_that_its_fit_had_not_seen() -> None:
    """Every fourth takes half as long again; the others follow the costs exactly."""
    kernels = [Other("ADD", 0.0, 50.0 * n, 0.0, 0.0) for n in range(1, 25)]
    times = [(100 + 2 * of.units) * (1 if i % 4 else 1.5) for i, of in enumerate(kernels)]
    cost = _fit_other("ADD", 1, measured(kernels, times), WARM)
    assert cost.spread == pytest.approx(1.4826 * np.log(1.5), rel=0.01)
    exact = _fit_other("ADD", 1, measured(kernels, [100 + 2 * of.units for of in kernels]), WARM)
    assert (exact.ns, exact.ns_per_unit) == (pytest.approx(100), pytest.approx(2))
    assert exact.spread == LEAST_SPREAD


def test_relative_errors_count_and_outliers_lose_weight() -> None:
    """A large kernel that took ten times as long moves small ones by a few percent at most."""
    kernels = [Other("ADD", 0.0, 50.0 * 1.5**n, 0.0, 0.0) for n in range(16)]
    times = [100 + 2 * of.units for of in kernels]
    times[-2] *= 10
    cost = _fit_other("ADD", 1, measured(kernels, times), WARM)
    found = [cost.ns + cost.ns_per_unit * of.units for of in kernels]
    for i, (of, ns) in enumerate(zip(kernels, found, strict=True)):
        assert ns == pytest.approx(100 + 2 * of.units, rel=0.1), i


def test_a_fit_separates_what_is_far_away() -> None:
    """An op of one token in a small and in a large working set, 300 ns and 3 ns a byte more."""
    two = _Fitted([], np.array([1e6, 1e8]), np.log([0.02, 0.03, 1, 1, 2]))
    found = [
        _Measured(Other("ADD, one token", 0.0, n, 0.0, n), size, 100 + 2 * n + cold * (300 + 3 * n))
        for n in (50.0, 200.0, 800.0, 3000.0)
        for size, cold in ((1e6, 0), (1e8, 1))
    ]
    cost = _fit_other("ADD, one token", 1, found, two)
    assert (cost.ns, cost.ns_per_unit) == pytest.approx((100, 2), rel=0.01)
    assert (cost.cold_ns, cost.cold_ns_per_byte) == pytest.approx((300, 3), rel=0.01)


def test_short_rows_cost_more_than_their_multiplications() -> None:
    """Rows of 64 to 4,096 weights, 0.01 ns for each and 5 ns for each row."""
    found = [
        _Measured(
            Product("F16", False, False, 1, length * rows, length, 1.0, rows), 1e6,
            500 + rows * (0.01 * length + 5),
        )
        for length in (64.0, 256.0, 1024.0, 4096.0)
        for rows in (256.0, 1024.0, 4096.0)
    ]  # fmt: skip
    fitted = _fit_products(found)
    assert fitted.ns_per_dot.tolist() == pytest.approx([5], rel=0.05)
    assert fitted.ns_per_mac.tolist() == pytest.approx([0.01], rel=0.05)


def test_each_type_converts_what_it_multiplies_at_its_own_cost() -> None:
    """On x86, Q8_K for a K-quant takes over 1 ns for each activation, Q8_0 a tenth of that."""
    found = [
        _Measured(
            Product(type_, False, False, 64, length * rows * 64, length * 64, 1.0, rows * 64), 1e6,
            500 + 64 * length * (0.01 * rows + per_input),
        )
        for type_, per_input in (("Q5_K", 1.5), ("Q8_0", 0.1))
        for length in (256.0, 1024.0, 4096.0)
        for rows in (64.0, 256.0, 1024.0)
    ]  # fmt: skip
    fitted = _fit_products(found)
    assert [of[0] for of in fitted.functions] == ["Q5_K", "Q8_0"]
    assert fitted.ns_per_input.tolist() == pytest.approx([1.5, 0.1], rel=0.1)


def test_one_token_and_several_read_weights_at_rates_of_their_own() -> None:
    """One at 50 GB/s, several at 10, from a working set beyond the caches."""
    found = [
        _Measured(
            Product("F16", False, False, tokens, macs * tokens, 1.0, 2 * macs, 1.0), size,
            500 + macs * (0.01 * tokens + (2 * per_byte if size > 1e7 else 0)),
        )
        for tokens, per_byte in ((1, 0.02), (4, 0.1))
        for macs in (1e5, 1e6, 1e7)
        for size in (1e6, 1e8)
    ]  # fmt: skip
    fitted = _fit_products(found)
    one, several = fitted.of_stream.tolist()
    assert fitted.functions == [("F16", False, False), ("F16", False, True)][::-1]
    assert one / several == pytest.approx(5, rel=0.2)


def test_an_embedding_at_the_start_of_a_file_is_read_more_slowly() -> None:
    """By 0.01 ns for each of its first bytes, as a page of 4 KiB then costs 40 ns more."""
    found = [
        _Measured(
            Product("F16", False, False, 1, macs, 1.0, 2 * macs, 1.0, start), 1e8,
            500 + macs * 0.07 + 0.01 * start,
        )
        for macs in (1e5, 1e6, 1e7)
        for start in (0.0, 2 * macs)
    ]  # fmt: skip
    assert _fit_products(found).shared[2] == pytest.approx(0.01, rel=0.1)


def test_the_last_token_of_a_prefill_is_no_decode() -> None:
    """Its products find their weights further away than those of a decode."""
    product_of = partial(Product, "F16", False, False)
    of = Features([product_of(1, 1e6, 1e3, 2e6, 1e3), product_of(8, 8e6, 8e3, 2e6, 8e3)], 1e6)
    times = np.array([9e5, 8e4])
    products, _ = _split([Sample(1, 8, 0, of, times, 1e6, np.array([1e6]))])
    assert [m.kernel.tokens for m in products] == [8]


def test_an_attention_whose_work_is_only_bounded_does_not_count() -> None:
    known = Other("FLASH_ATTN_EXT 64 long tiled", 8.0, 1.0, 1e6, 0.0)
    of = Features([known, dataclasses.replace(known, flops=4e6, bound=True)], 1e6)
    _, others = _split([Sample(1, 64, 0, of, np.array([1e5, 1e5]), 2e5, np.array([2e5]))])
    assert {op: [m.kernel for m in of_op] for op, of_op in others.items()} == {known.op: [known]}


def test_reading_is_never_faster_in_a_larger_working_set() -> None:
    rates = _Fitted([], np.array([1e6, 1e7, 1e8]), np.log([0.02, 1e-6, 0.01, 1, 1, 2])).ns_per_byte
    assert rates.tolist() == pytest.approx([0.02, 0.020001, 0.030001])


def test_the_bandwidth_is_fitted_at_sizes_that_lie_apart() -> None:
    def of(size: float, tokens: int = 1, experts: bool = False) -> _Measured[Product]:
        return _Measured(Product("F16", False, experts, tokens, 1.0, 1.0, 1.0, 1.0), size, 1.0)

    sizes = [1.0, 2, 2.5, 5, 6, 13, 30, 61, 200, 500]
    found = _sizes([of(7.0, 64), of(0.1, 1, True), *map(of, sizes)])
    assert found.tolist() == [1, 2.5, 6, 13, 30, 61]
    assert _sizes([of(7.0, 64)]).tolist() == [7]


def replace_times(sample: Sample, factor: float) -> Sample:
    return dataclasses.replace(sample, ns=sample.ns * factor, step_ns=sample.step_ns * factor)


def test_a_file_of_another_architecture_is_refused() -> None:
    machine = made_machine()
    assert machine.kernel_model is not None
    machine.kernel_model.architecture = "pdp11"
    with pytest.raises(UsageError, match="architecture pdp11"):
        kernel_model(machine, 1)


@pytest.mark.parametrize(
    ("version", "why"),
    [(1, "because an older `instr probe` wrote it"), (2, "because it was measured without scipy")],
)
def test_a_file_without_costs_says_why_and_what_to_install(
    version: Literal[1, 2], why: str
) -> None:
    """The first version of the file has none; later, they are missing without the extra."""
    with pytest.raises(UsageError, match=why) as error:
        kernel_model(replace(made_machine(), kernel_model=None, probe=version), 1)
    assert 'after pip install "llamacpp-instr[predict]"' in str(error.value)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    machine = made_machine(watts=65.0)
    path = tmp_path / "machine.json"
    path.write_bytes(probe_json(machine))
    assert read_probe(path) == machine


def made_samples(model: KernelModel) -> list[Sample]:
    """Decodes of models of four sizes in which every kernel takes what the machine says."""
    found = []
    for threads in model.threads:
        for tokens in (1, 64):
            for size in (MB, 4 * MB, 20 * MB, 100 * MB):
                kernels: list[Product | Other] = []
                for type_ in TYPES:
                    for macs, length in itertools.product((0.05e6, 0.2e6, 1e6, 5e6), (256, 2048)):
                        of_token = macs, length, macs, macs / length
                        work, inputs, n_bytes, dots = (float(of) * tokens for of in of_token)
                        kernels.append(
                            Product(
                                type_, False, False, tokens, work, inputs, n_bytes / tokens, dots
                            )
                        )
                op = "ADD" + ONE * (tokens == 1)
                kernels += [Other(op, n, 4e3 * n, 0.0, 0.0) for n in (1.0, 7.0, 90.0)]
                costs = _Costs(model, threads, float(size))
                ns = np.array([costs.of(kernel)[0] for kernel in kernels])
                step = float(ns.sum()) + 20_000
                of = Features(kernels, float(size))
                found.append(Sample(threads, tokens, 0, of, ns, step, np.array([step])))
    return found


def test_a_fit_recovers_the_machine_that_made_the_times() -> None:
    measured = made_samples(made_model())
    fitted = fit([measured], {2: 65.0})
    assert [of.watts for of in fitted.overheads] == [None, 65.0]
    for sample in measured:
        costs = _Costs(fitted, sample.threads, sample.features.working_set)
        predicted = np.array([costs.of(kernel)[0] for kernel in sample.features.kernels])
        assert predicted == pytest.approx(sample.ns, rel=0.05)
        assert predicted.sum() == pytest.approx(sample.ns.sum(), rel=0.02)


def test_the_spread_contains_what_the_fit_had_not_seen() -> None:
    """Times with a known disturbance of 10 % have a spread of about that."""
    random = np.random.default_rng(1)
    measured = made_samples(made_model(threads=(1,)))
    for sample in measured:
        sample.ns[:] *= np.exp(random.normal(0, 0.1, len(sample.ns)))
    fitted = fit([measured], {})
    spreads = [product.spread for product in fitted.products]
    assert 0.03 < float(np.median(spreads)) < 0.2
