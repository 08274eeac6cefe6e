"""`instr compare` of logs and models whose figures are written by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.compare import (
    Candidate,
    Pair,
    Row,
    Side,
    arrow,
    bits_per_weight,
    check_recorded,
    compute_comparison,
    faster_or_slower,
    more_or_fewer,
    recorded_model,
    short_names,
    sqnr_words,
)
from llamacpp_instr.converters.analyses.memory import StoredModel, StoredTensor, types_of
from llamacpp_instr.converters.analyses.noise import Ratio
from llamacpp_instr.converters.analyses.step_times import (
    PhaseUses,
    StepTimes,
    Use,
    compute_use_times,
    rates_of,
)
from llamacpp_instr.lab.weights.figures import Sums, WeightError
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.recording.memory.breakdown import read_breakdown
from tests.kit.reports import by_title, rows, session_of
from tests.kit.sketched_log import Sketch

QUERY, NORM = "blk.0.attn_q.weight", "output_norm.weight"
READS = Use(QUERY, "MUL_MAT")
WORK, MOVED = 2 * 4 * 8, 64 + 16 + 32
"""of the product of a sketch: a matrix of 4 by 8 in 64 bytes, a row of 4 floats, one of 8"""


def sketched(
    path: Path, decodes: Sequence[int], products: Sequence[int], n_bytes: int = 64,
    type_: str = "f16",
) -> Session:  # fmt: skip
    """A prefill of six tokens in 3 µs, then decodes that take `decodes` ns, with one sampled token
    each. The matrix product takes `products` ns of each decode."""
    sketch = Sketch(type_)
    sketch.weight(n_bytes, type_, "CPU")
    for event in sketch.events:
        if isinstance(event, s.Tensor):
            event.name, event.ne = QUERY, [4, 8]
    sketch.step(3000, 6, sampled=10, ops=([2000, 500], [0, 0]))
    for ns, product in zip(decodes, products, strict=True):
        sketch.step(ns, sampled=10, ops=([product, ns - product], [0, 0]))
    return session_of(path, sketch.events)


def model_of(name: str, *tensors: tuple[str, str, tuple[int, ...], int]) -> StoredModel:
    return StoredModel(name, f"llama, {name}", [StoredTensor(*of) for of in tensors], 5000, 4000)


LARGE = model_of("F16", (QUERY, "F16", (4, 8), 64), (NORM, "F32", (8,), 32))
SMALL = model_of("Q8", (QUERY, "Q8_0", (4, 8), 34), (NORM, "F32", (8, 1), 32))


def error_of(name: str, x2: float, e2: float) -> WeightError:
    kind = BY_NAME["Q8_0"]
    sums = Sums(1, x2, x2, e2)
    return WeightError(name, 0, "w", kind, kind, 1, 1, sums, *[0.0] * 5, 0, 0.0, 0)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (Ratio(170, 100, 100 / 170, 0.55, 0.62), "1.70× faster"),
        (Ratio(100, 125, 1.25, 1.2, 1.3), "1.25× slower"),
        (Ratio(100, 125, 1.25, 0.9, 1.6), "within noise"),
        (Ratio(100, 125, 1.25, None, None), "too few to tell"),
    ],
)
def test_a_speed_is_named_only_where_the_noise_allows(ratio: Ratio, words: str) -> None:
    assert faster_or_slower(ratio) == words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (0, "same bytes"),
        (-0.4706, "47 % fewer bytes"),
        (0.125, "12 % more bytes"),
        (-0.0004, "0.04 % fewer bytes"),
    ],
)
def test_how_many_bytes(change: float, words: str) -> None:
    assert more_or_fewer(change) == words


def test_short_names() -> None:
    paths = [Path("a/model-7b-Q8_0.gguf"), Path("a/model-7b-Q4_K.gguf")]
    assert short_names(paths, paths) == ["Q8_0", "Q4_K"]
    same = [Path("a/m.gguf"), Path("b/m.gguf")]
    assert short_names(same, [Path("x.log"), Path("y.log")]) == ["x", "y"]
    assert short_names(same, same) == ["a/m.gguf", "b/m.gguf"]
    assert short_names([Path("m.gguf"), Path("m-Q8_0.gguf")], same) == ["m", "m-Q8_0"]


def test_words_of_rows() -> None:
    assert arrow("Q8_0", "Q8_0") == "Q8_0"
    assert arrow("Q8_0", "Q4_K") == "Q8_0 → Q4_K"

    def row(a: float | None, b: float | None) -> Row:
        sides = [Side("", 4, db) for db in (a, b)]
        return Row("w", 0, *sides, {})

    assert sqnr_words(row(None, 3.0)) is None
    assert sqnr_words(row(3.0, None)) is None
    assert sqnr_words(row(46.12, 22.28)) == "46.1 → 22.3"
    assert sqnr_words(row(math.inf, 22.28)) == "22.3"
    assert sqnr_words(row(math.inf, math.inf)) == "∞"
    assert Row("w", 0, Side("", 4, None), Side("", 3, None), {}).change == -0.25
    assert Row("w", 0, Side("", 0, None), Side("", 3, None), {}).change == 0
    assert more_or_fewer(0.01) == "1 % more bytes"
    assert more_or_fewer(0.0099) == "0.99 % more bytes"


def test_types_are_ordered_by_their_bytes() -> None:
    tensors = [StoredTensor(f"t{i}", name, (32,), n) for i, (name, n) in enumerate(
        [("Q8_0", 34), ("F32", 60), ("Q8_0", 34), ("F16", 64)])]  # fmt: skip
    assert types_of(tensors) == ["Q8_0", "F16", "F32"]
    assert bits_per_weight(tensors) == 8 * 192 / 128
    assert (types_of([]), bits_per_weight([])) == ([], 0)


def test_a_log_of_another_model_is_refused(tmp_path: Path) -> None:
    session = sketched(tmp_path / "a.log", [100], [60])
    check_recorded(session, LARGE)
    for other, has in (
        (model_of("other", (QUERY, "Q8_0", (4, 8), 64)), "Q8_0"),
        (model_of("other", (QUERY, "F16", (4, 8), 65)), "F16"),
        (model_of("other", (NORM, "F16", (4, 8), 64)), "missing"),
    ):
        words = f"recorded a model other than other: {QUERY} is F16 in the log, {has} in the file"
        with pytest.raises(UsageError, match=words):
            check_recorded(session, other)
    assert recorded_model(session) is session.models[0]
    session.models[1] = session.models[0]
    with pytest.raises(UsageError, match="recorded 2 models; a comparison needs a log of one"):
        recorded_model(session)


def test_rates_are_medians_of_work_by_time(tmp_path: Path) -> None:
    times = StepTimes(sketched(tmp_path / "a.log", [500, 300, 700], [200, 100, 400]))
    group = PhaseUses([times], "decode").group([READS])
    assert group is not None
    assert group[0].tolist() == [200, 100, 400]
    rates = rates_of(group)
    assert rates.bytes == pytest.approx(MOVED / 200e-9)
    assert rates.flops == pytest.approx(WORK / 200e-9)
    prefill = PhaseUses([times], "prefill")
    assert list(prefill.row) == [READS]
    of_prefill = prefill.group([READS])
    assert of_prefill is not None
    assert of_prefill[0].tolist() == [2000]
    assert prefill.group([Use(QUERY, "GET_ROWS")]) is None
    assert prefill.group([READS, Use(NORM, "MUL")]) is None
    assert prefill.group([]) is None
    # a use that took no time has no rate
    idle = PhaseUses([StepTimes(sketched(tmp_path / "b.log", [500], [0]))], "decode")
    nothing = idle.group([READS])
    assert nothing is not None
    assert rates_of(nothing) == (None, None)


def test_kernels_are_lower_deciles_over_sessions(tmp_path: Path) -> None:
    decodes = [[1000 + 10 * i for i in range(11)], [2000 + 10 * i for i in range(11)]]
    sessions = [
        StepTimes(sketched(tmp_path / f"{i}.log", of, [600] * 11)) for i, of in enumerate(decodes)
    ]
    uses = PhaseUses(sessions, "decode")
    # the product, and the lower decile of the other kernel: 410 and 1410
    assert uses.kernels().value == pytest.approx(math.sqrt(1010 * 2010), rel=0.1)
    assert uses.begins.tolist() == [11]
    assert uses.time.shape == (2, 22)
    assert np.nansum(uses.time) == sum(map(sum, decodes))


def test_a_group_that_one_side_lacks_has_no_times(tmp_path: Path) -> None:
    a = PhaseUses([StepTimes(sketched(tmp_path / "a.log", [500] * 4, [200] * 4))], "decode")
    b = PhaseUses([StepTimes(sketched(tmp_path / "b.log", [500] * 4, [100] * 4))], "decode")
    other = Use(QUERY, "GET_ROWS")
    first, none, nothing, last = compute_use_times(a, b, [[READS], [other], [], [READS]])
    assert (none, nothing) == (None, None)
    assert first is not None
    assert last is not None
    assert (first.ratio.a, first.ratio.b, first.ratio.value) == (200, 100, 0.5)
    assert last.ratio == first.ratio
    one, two = first.rates
    assert (one.flops, two.flops) == (
        pytest.approx(WORK / 200e-9), pytest.approx(WORK / 100e-9)
    )  # fmt: skip
    assert compute_use_times(a, b, [[other]]) == [None]


@pytest.fixture
def candidates(tmp_path: Path) -> list[Candidate]:
    """The second reads the query in half the time, and its steps take three quarters."""
    decodes, products = [400, 410, 390, 405, 395, 400], [200] * 6
    large = sketched(tmp_path / "a.log", decodes, products)
    small = sketched(tmp_path / "b.log", [3 * ns // 4 for ns in decodes], [100] * 6, 34, "q8_0")
    context = next(iter(large.contexts.values()))
    uses = [s.BufferUse(buffer="CPU", model=1000, context=200, compute=30)]
    return [
        Candidate("F16", LARGE, sessions=[large], memory=read_breakdown(context, uses, []),
                  is_reference=True),
        Candidate("Q8", SMALL, sessions=[small], errors={QUERY: error_of(QUERY, 1000, 1)}),
    ]  # fmt: skip


def test_figures_of_candidates(candidates: list[Candidate]) -> None:
    large, small = candidates
    assert large.phases() == {"prefill", "decode"}
    assert large.tokens_per_second("decode") == pytest.approx(1e9 / 400)
    assert small.tokens_per_second("decode") == pytest.approx(1e9 / 300)
    assert large.tokens_per_second("prefill") == pytest.approx(6e9 / 3000)
    assert large.tokens_per_second("encode") is None
    assert Candidate("none", LARGE).phases() == set()
    assert large.sqnr_db([QUERY]) == math.inf
    assert small.sqnr_db([QUERY, NORM]) == pytest.approx(30)
    assert small.sqnr_db([NORM]) is None
    pair = Pair(large, small)
    pair.check()
    assert pair.names == [QUERY, NORM]
    assert pair.step_ratio("decode").value == pytest.approx(0.75, rel=0.01)
    with pytest.raises(UsageError, match="have no tensor in common"):
        Pair(large, Candidate("none", model_of("none"))).check()
    wide = Candidate("wide", model_of("wide", (QUERY, "F16", (8, 4), 64)))
    words = rf"{QUERY} has the shape \[4, 8\] in one, \[8, 4\] in the other"
    with pytest.raises(UsageError, match=words):
        Pair(large, wide).check()


def test_every_table_of_two_models(candidates: list[Candidate]) -> None:
    models, *tables = compute_comparison(candidates, "a reference")
    assert models.title.startswith("Q8 against F16: 31 % fewer bytes, ")
    assert "prefills 6 tokens" in models.title
    assert models.title.endswith("SQNR 30.0 dB.")
    assert "SQNR is relative to a reference." in models.notes
    assert models.rows == [
        ["F16", pytest.approx(1e9 / 400), pytest.approx(6e9 / 3000), None, 5000, 1.0,
         8 * 96 / 40, math.inf, "llama, F16", 96, 1000, 200, 30],
        ["Q8", pytest.approx(1e9 / 300), pytest.approx(6e9 / 3000), None, 5000, 66 / 96,
         8 * 66 / 40, pytest.approx(30), "llama, Q8", 66, None, None, None],
    ]  # fmt: skip
    found = by_title(tables)
    layers = found["Bits per weight and types by layer"]
    assert layers.rows == [[-1, 32.0, "F32", 32.0, "F32"], [0, 16.0, "F16", 8.5, "Q8_0"]]
    tensors = rows(found["Q8 against F16, by tensor"])
    assert [row["tensor"] for row in tensors] == ["blk.0.attn_q", "output_norm"]
    query, norm = tensors
    figures: dict[str, Any] = {
        "A types": "F16", "B types": "Q8_0", "change of bytes": 34 / 64 - 1, "A bytes": 64,
        "B bytes": 34, "decode B / A": 0.5, "decode A": 200, "decode B": 100,
        "decode bytes/s A": MOVED / 200e-9, "decode bytes/s B": (MOVED - 64 + 34) / 100e-9,
        "decode FLOP/s A": WORK / 200e-9, "decode FLOP/s B": WORK / 100e-9, "B SQNR": 30,
        "prefill A": 2000, "prefill B": 2000,
    }  # fmt: skip
    assert {name: query[name] for name in figures} == pytest.approx(figures)
    assert query["decode from"] < 0.5 < query["decode to"]
    assert (norm["change of bytes"], norm["decode A"], norm["decode B / A"]) == (0, None, None)
    (role, other) = rows(found["Q8 against F16, by role"])
    assert (role["role"], other["role"]) == ("attn_q", "output_norm")
    assert role["decode A"] == 200
    (layer,) = rows(found["Q8 against F16, by layer"])
    assert (layer["layer"], layer["A bytes"], layer["decode B"]) == (0, 64, 100)


def test_words_for_a_reader(candidates: list[Candidate]) -> None:
    _, *tables = compute_comparison(candidates, every_tensor=False)
    found = by_title(tables)["Q8 against F16, by tensor"]
    assert [column.name for column in found.columns][3] == "decode"
    query, norm = found.rows
    assert query == ["blk.0.attn_q", "F16 → Q8_0", "47 % fewer", query[3], "30.0"]
    assert query[3] in ("2.00× faster", "within noise", "too few to tell")
    assert norm == ["output_norm", "F32", "same", None, None]


def test_of_many_tensors_the_most_important_are_shown() -> None:
    """Without times, these are the ones with the most bytes. The others are counted, and so are
    those that only one model has."""
    many = [(f"blk.{i}.ffn_up.weight", "F16", (4, 8), 100 + i) for i in range(23)]
    a, b = model_of("a", *many, ("only.weight", "F16", (4,), 8)), model_of("b", *many)
    *_, tensors = compute_comparison([Candidate("a", a), Candidate("b", b)], every_tensor=False)
    assert [row[0] for row in tensors.rows] == [f"blk.{22 - i}.ffn_up" for i in range(20)]
    assert tensors.notes == [
        "20 of 23 rows, those that are largest: -o FILE.html has all.",
        "Only in a: only.weight.",
    ]
    twenty = model_of("c", *many[:20])
    *_, tensors = compute_comparison(
        [Candidate("c", twenty), Candidate("d", twenty)], every_tensor=False
    )
    assert (len(tensors.rows), tensors.notes) == (20, [])
    three = [Candidate(name, twenty) for name in "abc"]
    assert compute_comparison(three)[0].title == "2 models against a"
    assert compute_comparison(three)[0].notes == [f"{n} against a: same bytes." for n in "bc"]


def tied(path: Path, decodes: int, rows_ns: int) -> Session:
    """Decodes in which a product and a look-up read the same matrix."""
    sketch = Sketch()
    sketch.weight(64, "f16", "CPU")
    for event in sketch.events:
        if isinstance(event, s.Tensor):
            event.name, event.ne = QUERY, [4, 8]
        if isinstance(event, s.Graph):
            assert event.nodes is not None
            event.nodes.op, event.nodes.src = ["MUL_MAT", "GET_ROWS"], [[-1, -2], [-1, -2]]
    sketch.step(3000, 6, sampled=10, ops=([2000, 500], [0, 0]))
    for _ in range(decodes):
        sketch.step(1000, sampled=10, ops=([200, rows_ns], [0, 0]))
    return session_of(path, sketch.events)


def test_a_matrix_that_two_ops_read_has_a_row_for_each(tmp_path: Path) -> None:
    a, b = (
        Candidate(name, LARGE, sessions=[tied(tmp_path / f"{name}.log", 6, ns)])
        for name, ns in (("a", 100), ("b", 300))
    )
    pair = Pair(a, b)
    product, look_up, norm = pair.tensors()
    assert [row.name for row in (product, look_up, norm)] == [
        "blk.0.attn_q MUL_MAT", "blk.0.attn_q GET_ROWS", "output_norm",
    ]  # fmt: skip
    assert product.times["decode"].ratio.value == 1
    assert look_up.times["decode"].ratio.value == pytest.approx(3)
    assert (product.a.n_bytes, look_up.b.n_bytes) == (64, 64)
    assert norm.times == {}
    whole = pair.whole()
    assert whole.times["decode"].ratio.value == pytest.approx(500 / 300)
    assert (whole.a.n_bytes, whole.layer) == (96, 0)
    by_layer = {row.layer: row for row in pair.by(lambda of: of.layer)}
    assert by_layer[0].times["prefill"].ratio.a == 2500
    assert by_layer[-1].times == {}


def test_models_without_logs_have_no_times_and_no_settings(tmp_path: Path) -> None:
    session = tied(tmp_path / "a.log", 6, 100)
    pair = Pair(Candidate("a", LARGE, sessions=[session]), Candidate("b", SMALL))
    assert (pair.phases, pair.in_turns, pair.disturbed) == ({}, False, False)
    titles = [of.title for of in compute_comparison([pair.a, pair.b])]
    assert "Recorded differently" not in titles
    assert pair.whole().times == {}
