"""The tables of llama-bench's repetitions, and of configurations that took turns."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.converters.analyses.bench import (
    Repetition,
    bench_reports,
    compare_configurations,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import Account, counted_steps
from llamacpp_instr.report.render import render_text
from tests.analyses.test_compare_in_turns import by_pairs
from tests.kit.in_process import printed
from tests.kit.native_kit import ROOT
from tests.kit.reports import column, rows, session_of
from tests.kit.steady_log import N_DECODES, N_RUNS, steady_log

LOADS = (1.0, 2.0, 1.3, 3.0, 1.1)
"""what other processes do to a round"""
FASTER = (1.70, 1.80, 1.76, 1.74, 1.80)


def noted(t: int, name: str = "llama-bench", **facts: Any) -> s.Note:
    return s.Note(t=t, name=name, data={"n_depth": 0, "n_threads": 1, **facts})


def account_of(directory: Path, *facts: dict[str, Any]) -> Account:
    """Six runs of equal decodes; after each, a note with the facts of its repetition."""
    events: list[s.Event] = []
    given = iter(facts)
    for event in steady_log(0):
        events.append(event)
        if isinstance(event, s.Mark) and event.phase == "end":
            begin = next(e.t for e in events if isinstance(e, s.Mark) and e.mark == event.mark)
            events.append(noted(event.t + 500, ns=event.t - begin + 900, **next(given)))
    session = session_of(directory / "bench.log", events)
    return Account(session, counted_steps(session)[0])


def test_a_row_is_the_repetitions_of_a_test(tmp_path: Path) -> None:
    """Tests may come in any order, and differ in settings alone."""
    one = {"test": 1, "n_prompt": 0, "n_gen": N_DECODES}
    two = {**one, "test": 2, "type_k": "q8_0", "backend": "BLAS"}
    account = account_of(tmp_path, one, two, one, one, two, one)
    speeds, times = bench_reports(account)
    assert column(speeds, "test") == ["tg20", "tg20"]
    assert column(speeds, "type_k") == ["f16", "q8_0"]
    assert column(speeds, "backend") == ["CPU", "BLAS"]
    assert column(speeds, "repetitions") == [4, 2]
    assert "type_v" not in [of.name for of in speeds.columns], "all have llama-bench's default"
    assert speeds.keys()[: speeds.labels] == ["test", "backend", "type_k"]
    steps = account.steps["end"] - account.steps["begin"]
    total = steps.sum() / N_RUNS + 900
    assert column(times, "repetition") == [total, total]
    assert column(times, "kernels") == [pytest.approx(steps.sum() / N_RUNS)] * 2
    assert column(times, "the program") == [pytest.approx(900)] * 2


def test_the_summary_of_a_recorded_llama_bench_has_the_digits_that_it_printed() -> None:
    lines = printed("summary", ROOT / "tests" / "fixtures" / "llama-bench.log.gz").splitlines()
    rows = [re.split(r"  +", line.strip()) for line in lines]
    table = rows[rows.index(["Benchmark"]) + 2 :]
    assert [row[:3] for row in table[:2]] == [
        ["pp8", "7560.56", "1762.45"], ["tg2", "3861.88", "80.52"],
    ]  # fmt: skip


@pytest.mark.parametrize("ns", [[10**9], [10**9, 2 * 10**9, 10**9 + 7]])
def test_a_rate_has_the_deviation_of_its_repetitions(tmp_path: Path, ns: list[int]) -> None:
    events = [e for e in steady_log(0) if isinstance(e, s.SessionStart)]
    notes = [noted(events[0].t + of, test=1, n_prompt=512, n_gen=0, ns=of) for of in sorted(ns)]
    session = session_of(tmp_path / "bench.log", [*events, *notes])
    (row,) = rows(bench_reports(Account(session, session.steps))[0])
    rates = [512e9 / of for of in ns]
    assert row["t/s"] == pytest.approx(statistics.mean(rates))
    assert row["±"] == pytest.approx(statistics.stdev(rates) if len(ns) > 1 else 0)
    assert (row["lowest"], row["highest"]) == (min(rates), max(rates))
    assert row["model"] is None, "the log has no step of it"


def test_notes_of_others_are_no_repetitions(tmp_path: Path) -> None:
    events: list[s.Event] = [*steady_log(0)]
    end = max(event.t for event in events)
    whole = {"test": 1, "n_prompt": 1, "n_gen": 0, "ns": 5}
    events += [
        noted(end, "mine", **whole),
        noted(end, text="test"),
        noted(end, **whole | {"ns": "5"}),
    ]
    session = session_of(tmp_path / "bench.log", events)
    assert bench_reports(Account(session, session.steps)) == []


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ((512, 0, 0), "pp512"), ((0, 128, 4096), "tg128 @ d4096"), ((32, 8, 0), "pp32+tg8"),
    ],
)  # fmt: skip
def test_the_name_of_a_test(test: tuple[int, int, int], name: str) -> None:
    assert Repetition(1, *test, n_threads=1, ns=1).name == name


def in_turns(directory: Path, factors: Sequence[float]) -> list[tuple[str, list[Session]]]:
    """Two models: rounds of two tests, under load; the second model has the second test
    `factors` times as fast."""
    found = []
    start = next(e for e in steady_log(0) if isinstance(e, s.SessionStart))
    for side, model in enumerate("AB"):
        sessions = []
        for i, factor in enumerate(factors):
            events: list[s.Event] = [start]
            for test, ns in ((1, 4_000_000), (2, 50_000_000)):
                ns = round(ns * LOADS[i] / (factor if side and test == 2 else 1))
                facts = {"test": test, "n_prompt": 8 * (test == 1), "n_gen": 4 * (test == 2)}
                events.append(noted(events[-1].t + ns, "instr bench", ns=ns, **facts))
            sessions.append(session_of(directory / f"{model}-{i + 1}.log", events))
        found.append((model, sessions))
    return found


def test_a_difference_in_every_round_shows_under_load(tmp_path: Path) -> None:
    table, machine, each = compare_configurations(
        in_turns(tmp_path, FASTER), {"governor": ("powersave", "text")}, every_round=True
    )
    found = {(row["model"], row["test"]): row for row in rows(table)}
    assert [*found] == [("A", "pp8"), ("A", "tg4"), ("B", "pp8"), ("B", "tg4")]
    first, same, other = found["A", "tg4"], found["B", "pp8"], found["B", "tg4"]
    assert (first["× first"], first["verdict"]) == (None, None)
    assert (same["× first"], same["verdict"]) == (1, "within noise")
    assert [other[name] for name in ("× first", "from", "to")] == pytest.approx(
        by_pairs(FASTER, n_family=2), rel=1e-4
    )
    assert other["verdict"] == "faster"
    rates = [4e9 / (50_000_000 * load / of) for load, of in zip(LOADS, FASTER, strict=True)]
    assert other["t/s"] == pytest.approx(statistics.mean(rates))
    assert other["±"] == pytest.approx(statistics.stdev(rates))
    names = ("t/s from", "t/s to")
    _, low, high = by_pairs(rates, n_family=4)
    assert [other[name] for name in names] == pytest.approx([low, high], rel=1e-4)
    assert ["governor", "powersave"] in machine.rows
    of_b = [row["t/s"] for row in rows(each) if (row["model"], row["test"]) == ("B", "tg4")]
    assert of_b == pytest.approx(rates)
    assert {row["log"] for row in rows(each)} == {
        str(tmp_path / f"{model}-{i}.log") for model in "AB" for i in range(1, 6)
    }


@pytest.mark.parametrize("n", [1, 4])
def test_fewer_than_five_rounds_do_not_show_the_noise(tmp_path: Path, n: int) -> None:
    table, _ = compare_configurations(in_turns(tmp_path, FASTER[:n]), {})
    assert {row["verdict"] for row in rows(table)} == {None, "too few to tell"}
    assert column(table, "t/s from") == [None] * 4
    assert any("Fewer than 5 rounds" in note for note in table.notes)


def test_an_interrupted_round_is_compared_without_its_pair(tmp_path: Path) -> None:
    configurations = in_turns(tmp_path, FASTER)
    configurations[1][1].pop()
    table, _ = compare_configurations(configurations, {})
    shorter, _ = compare_configurations(in_turns(tmp_path, FASTER[:4]), {})
    assert column(table, "× first")[2:] == column(shorter, "× first")[2:]


def test_what_is_shown_fits_in_80_columns(tmp_path: Path) -> None:
    reports = compare_configurations(in_turns(tmp_path, FASTER), {}, every_round=True)
    one = {"test": 1, "n_prompt": 0, "n_gen": N_DECODES}
    reports += bench_reports(account_of(tmp_path, *[one] * N_RUNS))
    assert max(map(len, render_text(reports).splitlines())) <= 80
