"""Costs for threads, types, ops and sizes that were not measured, and times by the formula."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llamacpp_instr.prediction.fit import (
    LEAST_SPREAD,
    Sample,
    _fit_all,
    _fit_products,
    _Measured,
    _similar,
    _spread_of_products,
    deviation,
)
from llamacpp_instr.prediction.model import (
    Features,
    Other,
    Predicted,
    Product,
    _Costs,
    between,
    coldness,
    other_ns,
    product_time,
    with_threads,
)
from llamacpp_instr.prediction.probe.file import (
    KernelModel,
    OtherCost,
    Overhead,
    ProductCost,
    Stream,
)

# --- other numbers of threads ---


def model_of(threads: dict[int, float], **spreads: float) -> KernelModel:
    """Every cost is the same number, by threads."""
    of = spreads.get("spread", 0.1)
    return KernelModel(
        "x",
        [ProductCost("F16", False, False, 1, n, c, c, of * n, c, c) for n, c in threads.items()],
        [Stream(n, 100, c) for n, c in threads.items()],
        [OtherCost("ADD", n, c, c, c, c, of * n, c, c) for n, c in threads.items()],
        [Overhead(n, c, c, c, c, of, c) for n, c in threads.items()],
    )


def costs(model: KernelModel) -> dict[str, float | None]:
    (product,), (stream,), (other,), (overhead,) = (
        model.products, model.streams, model.others, model.overheads
    )  # fmt: skip
    return {
        "ns_per_mac": product.ns_per_mac, "of_stream": product.of_stream,
        "bytes_per_second": stream.bytes_per_second, "ns": other.ns,
        "ns_per_row": other.ns_per_row, "ns_per_unit": other.ns_per_unit,
        "ns_per_flop": other.ns_per_flop, "product_ns": overhead.product_ns,
        "ns_per_input": product.ns_per_input, "blend": overhead.blend,
        "step_ns": overhead.step_ns, "watts": overhead.watts,
        "ns_per_dot": product.ns_per_dot, "cold_ns": other.cold_ns,
        "cold_ns_per_byte": other.cold_ns_per_byte, "cold_step_ns": overhead.cold_step_ns,
    }  # fmt: skip


def test_a_number_that_was_measured_is_taken_as_it_is() -> None:
    model = model_of({1: 5.0, 2: 7.0})
    assert with_threads(model, 2) is model


def test_with_one_measured_number_computing_gets_faster_and_nothing_else_changes() -> None:
    found = costs(with_threads(model_of({2: 8.0}), 4))
    assert found == (
        dict.fromkeys(found, 8.0) | {"ns_per_mac": 4.0, "ns_per_dot": 4.0, "ns_per_input": 4.0}
    )


@pytest.mark.parametrize(
    ("one", "four", "powers"),
    [
        # both grow with the square of the threads: extrapolated in proportion to them at most
        (1.0, 16.0, {"ns_per_mac": 0, "ns_per_dot": 0, "of_stream": 0, "blend": 0}),
        # both fall with the square
        (16.0, 1.0, {"ns_per_mac": -1, "ns_per_dot": -1, "ns_per_input": -1}),
        (2.0, 4.0, {"ns_per_mac": 0, "ns_per_dot": 0, "of_stream": 0, "blend": 0}),
    ],
)
def test_beyond_measured_numbers_costs_follow_a_power_within_what_can_be(
    one: float, four: float, powers: dict[str, float]
) -> None:
    usual = min(math.log(four / one) / math.log(4), 1.0) if four > one else 0.0
    found = costs(with_threads(model_of({1: one, 4: four}), 8))
    wanted = {name: four * 2 ** powers.get(name, usual) for name in found}
    assert found == pytest.approx(wanted)


def test_between_measured_numbers_costs_follow_the_power_that_joins_them() -> None:
    found = costs(with_threads(model_of({1: 1.0, 4: 16.0}), 2))
    assert found == pytest.approx(dict.fromkeys(found, 4.0))


def test_of_several_numbers_the_nearest_two_count() -> None:
    """For six threads those of 4 and 8, although 2 has other costs."""
    found = costs(with_threads(model_of({2: 900.0, 4: 4.0, 8: 8.0}), 6))
    assert found == pytest.approx(dict.fromkeys(found, 6.0))


def test_a_cost_of_zero_stays_zero_and_none_stays_none() -> None:
    model = model_of({1: 0.0, 4: 5.0})
    model.overheads[0].watts = model.overheads[1].watts = None
    found = costs(with_threads(model, 2))
    assert found["watts"] is None
    assert found["step_ns"] == 0.0, "as near to one thread, which comes first"
    assert costs(with_threads(model, 3))["ns"] == pytest.approx(5.0), "without a power"


@pytest.mark.parametrize(("threads", "doublings"), [(4, 1), (8, 2), (3, math.log2(1.5))])
def test_the_spread_of_steps_grows_by_half_for_each_doubling(
    threads: int, doublings: float
) -> None:
    found = with_threads(model_of({1: 1.0, 2: 2.0}), threads)
    assert found.overheads[0].spread == pytest.approx(math.hypot(0.1, 0.5 * doublings))
    assert found.products[0].spread == found.others[0].spread == pytest.approx(0.2), "the larger"


# --- times ---


@pytest.mark.parametrize(
    ("compute", "read", "ns"),
    [(300.0, 400.0, 500.0), (400.0, 300.0, 500.0), (300.0, 0.0, 300.0), (0.0, 0.0, 0.0)],
)
def test_a_product_blends_computing_and_reading(compute: float, read: float, ns: float) -> None:
    assert product_time(compute, read, 60.0, 2.0) == pytest.approx(60 + ns)


def test_other_kernels_cost_by_rows_units_and_operations() -> None:
    cost = OtherCost("ADD", 1, 1000.0, 100.0, 10.0, 1.0, 0.1)
    assert other_ns(Other("ADD", 2.0, 3.0, 4.0, 0.0), cost, 0.0) == 1000 + 200 + 30 + 4


def test_what_is_far_away_costs_more_while_one_token_is_decoded() -> None:
    cost = OtherCost("ADD", 1, 1000.0, 0.0, 0.0, 0.0, 0.1, cold_ns=200.0, cold_ns_per_byte=2.0)
    one, many = (Other(op, 1.0, 1.0, 0.0, 50.0) for op in ("ADD, one token", "ADD"))
    assert other_ns(one, cost, 0.0) == 1000
    assert other_ns(one, cost, 0.5) == 1000 + 0.5 * (200 + 2 * 50)
    assert other_ns(many, cost, 1.0) == 1000


def test_coldness_follows_the_time_of_reading() -> None:
    sizes, ns_per_byte = np.array([1e6, 1e8]), np.array([0.02, 0.08])
    found = coldness(sizes, ns_per_byte, np.array([1e5, 1e6, 1e7, 1e8, 1e9]))
    assert found.tolist() == pytest.approx([0, 0, 1 / 3, 1, 1])
    assert coldness(sizes, np.array([0.02, 0.02]), 1e7) == 0, "one speed for all"


def test_between_two_sizes_a_rate_follows_a_power() -> None:
    at, values = np.array([1.0, 100.0]), np.array([10.0, 1000.0])
    assert between(at, values, [0.1, 1, 10, 100, 1e6]).tolist() == pytest.approx(
        [10, 10, 100, 1000, 1000]
    )


def test_errors_of_one_source_add_up() -> None:
    ns, spread = np.array([100.0, 50, 30]), np.array([0.1, 0.2, 0.5])
    of = Predicted(ns, spread, ["a", "a", "b"], [], 20.0, 0.0)
    assert of.total() == (200.0, pytest.approx(math.hypot(10 + 10, 15)))
    shared = Predicted(of.ns, of.spread, of.source, [], 20.0, 0.25)
    assert shared.total()[1] == pytest.approx(math.sqrt(20**2 + 15**2 + 50**2))


TYPES = {  # type, repacked, experts: ns for each multiplication
    ("F16", False, False): 1.0, ("Q4_K", False, False): 3.0, ("Q4_K", True, False): 0.5,
    ("Q8_0", True, True): 9.0, ("Q6_K", False, False): 2.0,
}  # fmt: skip


def costs_by_type(threads: int = 1) -> _Costs:
    """Reading costs nothing."""
    products = [
        ProductCost(*key, tokens, n, rate / n / tokens, 1.0, 0.1 * tokens)
        for key, rate in TYPES.items()
        for tokens in (16, 1)
        for n in (1, 2)
    ]
    attention = [
        OtherCost(f"FLASH_ATTN_EXT {name}", 1, ns, 0.0, 0.0, 0.0, 0.3)
        for name, ns in (("64 short", 1.0), ("256 short", 2.0), ("64 long", 3.0),
                         ("128 long tiled", 4.0), ("128 long alone", 5.0))
    ]  # fmt: skip
    others = [OtherCost(op, n, ns * n, 0.0, 0.0, 0.0, 0.2) for n in (1, 2)
              for op, ns in (("", 10.0), (", one token", 20.0), ("ADD", 30.0),
                             ("GLU SWIGLU", 40.0), ("GLU SWIGLU, one token", 50.0))]  # fmt: skip
    overheads = [Overhead(n, 0.0, 12.0, 0.0, None) for n in (1, 2)]
    streams = [Stream(n, 100, 1e30) for n in (1, 2)]
    return _Costs(KernelModel("x", products, streams, others + attention, overheads), threads, 1.0)


@pytest.mark.parametrize(
    ("key", "rate", "name", "known"),
    [
        (("F16", False, False), 1.0, "F16", True),
        (("Q4_K", True, False), 0.5, "Q4_K repacked", True),
        (("Q8_0", True, True), 9.0, "Q8_0 repacked experts", True),
        # experts like dense ones; repacked like plain, but then it is not known
        (("Q4_K", True, True), 0.5, "Q4_K repacked experts", True),
        (("F16", True, False), 1.0, "F16 repacked", False),
        (("F16", True, True), 1.0, "F16 repacked experts", False),
        (("Q6_K", False, True), 2.0, "Q6_K experts", True),
        # of another type like the slowest that is dense
        (("IQ1_S", False, False), 3.0, "IQ1_S", False),
        (("Q8_0", False, False), 3.0, "Q8_0", False),
    ],
)
def test_a_type_that_was_not_measured_is_like_another(
    key: tuple[str, bool, bool], rate: float, name: str, known: bool
) -> None:
    found = costs_by_type().of(Product(*key, 1, 100.0, 0.0, 0.0, 0.0))
    assert found == (pytest.approx(100 * rate), 0.1 if known else 0.5, name, known)


def test_a_product_of_tokens_between_two_measured_ones_lies_between_them() -> None:
    costs = costs_by_type()
    ns, spread, *_ = costs.of(Product("F16", False, False, 4, 100.0, 0.0, 0.0, 0.0))
    assert (ns, spread) == (pytest.approx(100 / 4), 0.1)
    ns, spread, *_ = costs.of(Product("F16", False, False, 12, 100.0, 0.0, 0.0, 0.0))
    assert (ns, spread) == (pytest.approx(100 / 12), 1.6)


def test_costs_are_those_of_the_threads() -> None:
    found = costs_by_type(2)
    assert found.of(Product("F16", False, False, 1, 100.0, 0.0, 0.0, 0.0))[0] == pytest.approx(50)
    assert found.of(Other("ADD", 1, 1, 0, 0))[0] == 60


@pytest.mark.parametrize(
    ("op", "ns"),
    [
        ("ADD", 30.0), ("MUL", 10.0), ("MUL, one token", 20.0),
        # of the same op with another function, also in a file that does not name it
        ("GLU GEGLU", 40.0), ("GLU GEGLU, one token", 50.0), ("GLU", 40.0),
        ("FLASH_ATTN_EXT 64 short", 1.0),
        # of the next length with the same window and way, then of the same window
        ("FLASH_ATTN_EXT 80 short", 1.0), ("FLASH_ATTN_EXT 200 short", 2.0),
        ("FLASH_ATTN_EXT 256 long", 3.0), ("FLASH_ATTN_EXT 64 long tiled", 4.0),
        ("FLASH_ATTN_EXT 64 long alone", 5.0), ("FLASH_ATTN_EXT 100 short alone", 1.0),
        ("FLASH_ATTN_EXT 70 long tiled alone", 3.0),
    ],
)  # fmt: skip
def test_an_op_that_was_not_measured_is_like_another(op: str, ns: float) -> None:
    found = costs_by_type().of(Other(op, 1.0, 1.0, 0.0, 0.0))
    known = op in ("ADD", "FLASH_ATTN_EXT 64 short")
    spread = {"ADD": 0.2}.get(op, 0.3) if known else 0.5
    assert found == (ns, spread, op, known)


# --- fits ---


def test_a_deviation_is_not_moved_by_outliers() -> None:
    assert deviation(np.array([-1.0, 1, -1, 1, 900])) == pytest.approx(1.4826)
    assert deviation(np.array([])) == 0.0


def test_similar_kernels_are_neither_attention_nor_of_the_other_kind() -> None:
    def of(op: str) -> list[_Measured[Other]]:
        return [_Measured(Other(op, 1, 1, 0, 0), 1.0, 1.0)]

    rest = {op: of(op) for op in ("ADD", "MUL, one token", "FLASH_ATTN_EXT 64 short")}
    assert _similar(rest, one=False) == of("ADD")
    assert _similar(rest, one=True) == of("MUL, one token")
    few = {op: of(op) for op in ("ADD", "FLASH_ATTN_EXT 64 short")}
    assert _similar(few, one=True) == of("ADD"), "what there is"
    attention = {"FLASH_ATTN_EXT 64 short": of("FLASH_ATTN_EXT 64 short")}
    assert _similar(attention, one=False) == attention["FLASH_ATTN_EXT 64 short"]


def products(n: int, noise: float = 0.0) -> list[_Measured[Product]]:
    """Of one type, bound by computing: 2 ns for each thousand multiplications, and 600 ns."""
    random = np.random.default_rng(3)
    return [
        _Measured(
            Product("F16", False, False, 1, 1e6 * (i + 1), 1000.0, 10.0, 0.0), 1e6,
            (600 + 2e3 * (i + 1)) * float(np.exp(random.normal(0, noise))),
        )
        for i in range(n)
    ]  # fmt: skip


def test_a_fit_of_products_that_computing_bounds() -> None:
    fitted = _fit_products(products(12))
    assert fitted.keys == [("F16", False, False, 1)]
    assert fitted.ns_per_mac.tolist() == pytest.approx([0.002], rel=0.02)


def test_the_spread_of_products_comes_from_those_that_a_fit_had_not_seen() -> None:
    key = ("F16", False, False, 1)
    assert _spread_of_products(products(12)) == {key: LEAST_SPREAD}
    noisy = _spread_of_products(products(40, noise=0.2))
    assert 0.1 < noisy[key] < 0.35
    assert _spread_of_products(products(2)) == {}, "all are needed for the fit"
    assert _spread_of_products(products(3)) != {}


def test_a_step_without_decodes_costs_nothing_beside_its_kernels() -> None:
    def sample(tokens: int, step: float) -> Sample:
        kernels: list[Product | Other] = [
            Product("F16", False, False, tokens, 1e6, 10.0, 10.0, 0.0),
            Other("ADD", 1.0, 1.0, 0.0, 0.0),
        ]  # fmt: skip
        ns = np.array([2000.0, 100.0])
        return Sample(1, tokens, 0, Features(kernels, 1e6), ns, step, np.array([step]))

    (prefill,) = _fit_all([sample(8, 9000.0)], {1: 7.0}).overheads
    assert (prefill.step_ns, prefill.watts) == (0.0, 7.0)
    (decode,) = _fit_all([sample(1, 9000.0)], {2: 7.0}).overheads
    assert (decode.step_ns, decode.watts) == (6900.0, None)
    (negative,) = _fit_all([sample(1, 1000.0)], {}).overheads
    assert negative.step_ns <= 1.0


def test_the_costs_of_each_thread_are_fitted_apart() -> None:
    measured = products(8)
    add = Other("ADD", 1.0, 1.0, 0.0, 0.0)
    kernels: list[Product | Other] = [*(m.kernel for m in measured), add]
    samples = [
        Sample(threads, 1, 0, Features(kernels, 1e6),
               np.array([*(m.ns / threads for m in measured), 50.0]), 0.0, np.array([0.0]))
        for threads in (2, 1)
    ]  # fmt: skip
    found = _fit_all(samples, {})
    assert [of.threads for of in found.overheads] == [1, 2]
    one, two = found.products
    assert one.ns_per_mac / two.ns_per_mac == pytest.approx(2, rel=0.05)
