"""The trend of several logs or groups: ratios and intervals by hand, and where it says that the
speed changed."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from scipy import stats

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.diff import Diff, compute_diff, letters
from llamacpp_instr.converters.analyses.diff.trend import compute_trend
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import load_session
from tests.conftest import read_events
from tests.kit.in_process import instr_here, json_reports, printed, refusal
from tests.kit.made_log import make_log
from tests.kit.reports import rows, session_of
from tests.kit.split_log import split_log
from tests.kit.steady_log import group, scaled, slowed, steady_log, write

PROCESS = 0.02
"""the deviation between processes that docs/explanation/accuracy.md names, for sides of one log"""


def trend(directory: Path, logs: Sequence[list[s.Event]], by: str | None = None) -> Diff:
    """The trend of these logs."""
    sessions = [session_of(directory / f"v{i}.log", events) for i, events in enumerate(logs)]
    return compute_trend([[session] for session in sessions], by=by)


def slowed_logs(directory: Path, factors: Sequence[float], noise: float = 0.0) -> Diff:
    """The trend of one log for each factor on the time of its steps."""
    logs = [slowed(steady_log(i, noise), factor) for i, factor in enumerate(factors)]
    return trend(directory, logs, by="phase")


def median_ns(path: Path) -> float:
    """From the lines of the log."""
    events = read_events(path)
    begin = {e["step"]: e["t"] for e in events if e["event"] == "step_begin"}
    return float(np.median([e["t"] - begin[e["step"]] for e in events if e["event"] == "step_end"]))


def test_every_ratio_and_interval_of_single_logs_by_hand(tmp_path):
    """Steps that are all equal have no noise of their own. The 6 runs of a log are 12 blocks in 2
    strata, so a log has 10 degrees of freedom, and two with equal errors have 20 (or 19, if the
    last bits of the errors differ)."""
    factors = (1.0, 1.0, 1.3, 1.2)
    reach = math.exp(stats.t.ppf(1 - 0.05 / 2 / 5, 20) * PROCESS * math.sqrt(2))
    found = rows(slowed_logs(tmp_path, factors).reports[1])
    assert [row["side"] for row in found] == ["A", "B", "C", "D"]
    for i, row in enumerate(found):
        assert row["median step"] == median_ns(tmp_path / f"v{i}.log")
        if i == 0:
            assert set(list(row.values())[3:]) == {None}
            continue
        for name, ratio in (("first", factors[i]), ("previous", factors[i] / factors[i - 1])):
            assert row[f"/ {name}"] == pytest.approx(ratio, rel=1e-6)
            assert row[f"{name} from"] == pytest.approx(ratio / reach, rel=1e-3)
            assert row[f"{name} to"] == pytest.approx(ratio * reach, rel=1e-3)
    assert [row["than previous"] for row in found[1:]] == ["within noise", "slower", "within noise"]
    assert [row["than first"] for row in found[1:]] == ["within noise", "slower", "slower"]


def test_every_ratio_and_interval_of_groups_by_hand(tmp_path):
    """Welch's interval of the logarithms, for 3 ratios at once."""
    paths = [
        group(tmp_path, f"v{i}-", range(10 * i, 10 * i + 5 + i), factor, 0.02)
        for i, factor in enumerate((1.0, 1.3, 1.3))
    ]
    found = compute_trend([[load_session(path) for path in of] for of in paths], by="phase")
    a, b, c = ([math.log(median_ns(path)) for path in of] for of in paths)
    table = rows(found.reports[1])
    for row, name, before, after in (
        (table[1], "first", a, b),
        (table[1], "previous", a, b),
        (table[2], "first", a, c),
        (table[2], "previous", b, c),
    ):
        of = [np.var(side, ddof=1) / len(side) for side in (before, after)]
        parts = [v**2 / (len(side) - 1) for v, side in zip(of, (before, after), strict=True)]
        t = stats.t.ppf(1 - 0.05 / 2 / 3, int(sum(of) ** 2 / sum(parts)))
        middle = np.mean(after) - np.mean(before)
        bounds = [math.exp(middle + sign * t * math.sqrt(sum(of))) for sign in (0, -1, 1)]
        figures = [row[f"/ {name}"], row[f"{name} from"], row[f"{name} to"]]
        assert figures == pytest.approx(bounds, rel=1e-6), (row, name)
    assert found.steps["decode"].value == table[2]["/ first"], "--fail-above judges the last"
    assert [row["than previous"] for row in table[1:]] == ["slower", "within noise"]


def test_the_first_line_says_where_it_changed_and_how_much_in_all(tmp_path):
    title = slowed_logs(tmp_path, (1, 1, 1.3, 1.3, 0.65), noise=0.01).reports[0].title
    where, _, whole = title.partition(". From A to E: ")
    (slower, faster) = where.split("; ")
    assert slower.startswith("C decodes 0.7")
    assert " times as fast as B (0." in slower
    assert faster.startswith(("E decodes 2 times", "E decodes 1.9", "E decodes 2.0"))
    assert " times as fast as D (" in faster
    assert whole.startswith("E decodes 1.5")


def test_a_slow_drift_is_seen_from_the_first_to_the_last(tmp_path):
    title = slowed_logs(tmp_path, [1.05**i for i in range(5)]).reports[0].title
    assert title.startswith(
        "No change beyond the noise from one side to the next in decode."
        " From A to E: E decodes 0.823 times as fast ("
    )


def test_equal_logs_rarely_change(tmp_path):
    """Whole runs are disturbed at once; 5 % of the tables may be wrong."""
    sessions = [session_of(tmp_path / f"{i}.log", steady_log(i, 0.03)) for i in range(8, 18)]
    wrong = 0
    for three in zip(sessions, sessions[1:], sessions[2:], strict=False):
        found = rows(compute_trend([[session] for session in three], by="phase").reports[1])
        words = {row[name] for row in found for name in ("than first", "than previous")}
        wrong += not words <= {None, "within noise"}
    assert wrong <= 2, "more than 2 of 8 has a probability of 0.006 at 5 %"


def test_a_part_that_changed_is_named_with_the_side(tmp_path):
    log = steady_log(1, noise=0.01)
    later = scaled(log, "FLASH_ATTN_EXT", 1.3)
    (report,) = trend(tmp_path, (log, log, later, later), by="op").reports[2:]
    assert [column.name for column in report.columns[1:4]] == ["A", "D", "D / A"]
    for op, a, d, ratio, *_, than_first, changes in report.rows:
        changed = op == "FLASH_ATTN_EXT"
        assert ratio == pytest.approx(1.3 if changed else 1, rel=1e-5)
        assert d == pytest.approx(a * ratio)
        assert (than_first, changes) == (
            ("slower", "C slower") if changed else ("within noise", None)
        )


def two_layers(log: list[s.Event], factors: tuple[float, float]) -> list[s.Event]:
    """The log as if its steps had two layers, which take `factors` times 5 ms."""
    return [
        msgspec.structs.replace(e, layer=[1, 0], dur=[round(5e6 * f) for f in factors[::-1]])
        if isinstance(e, s.Layers)
        else e
        for e in log
    ]


@pytest.mark.parametrize("by", ["layer", "op"])
@pytest.mark.parametrize("several", [False, True])
def test_every_part_of_three_sides_by_hand(tmp_path, by, several):
    """Steps are equal, so a log has the assumed error only, and the mean of two logs of a side that
    divided by the root of 2."""
    log = steady_log(1)
    steps = [
        two_layers(scaled(scaled(log, "MUL_MAT", factor), "ADD", sums), (1, 2 * factor))
        for factor, sums in ((1.0, 1.0), (1.5, 9.0), (1.2, 1.0))
    ]
    n = 1 + several
    sides = [
        [session_of(tmp_path / f"{i}{j}.log", of) for j in range(n)] for i, of in enumerate(steps)
    ]
    (report,) = compute_trend(sides, by=by, phase="decode").reports[2:]
    found = {row[0]: row[1:] for row in report.rows}
    wanted = medians_by(by, steps)
    assert [column.name for column in report.columns[1:4]] == ["A", "C", "C / A"]
    order = sorted(wanted) if by == "layer" else sorted(wanted, key=lambda k: -max(wanted[k]))
    assert list(found) == order
    freedom = 20 * n
    reach = stats.t.ppf(1 - 0.05 / 2 / (3 * len(wanted)), freedom) * PROCESS * math.sqrt(2 / n)
    for key, (a, b, c) in wanted.items():
        figures = found[key][:5]
        bounds = [c / a * math.exp(sign * reach) for sign in (0, -1, 1)]
        assert figures == pytest.approx([a, c, *bounds], rel=2e-3)
        word = "slower" if math.log(c / a) > reach else "within noise"
        changes = "B slower, C faster" if b > a else None
        assert found[key][5:] == [word, changes]


def medians_by(by: str, steps: Sequence[list[s.Event]]) -> dict[int | str, list[float]]:
    """ns of a step on each side: of its layers, or of all kernels of an op and its type."""
    found: dict[int | str, list[float]] = {}
    for side, events in enumerate(steps):
        (nodes,) = [e.nodes for e in events if isinstance(e, s.Graph) and e.nodes is not None]
        (plan,) = [e for e in events if isinstance(e, s.Plan)]
        for event in events:
            if by == "layer" and isinstance(event, s.Layers):
                parts: list[tuple[int | str, int]] = list(zip(event.layer, event.dur, strict=True))
            elif by == "op" and isinstance(event, s.Ops):
                names = [nodes.op[i].replace("MUL_MAT", "MUL_MAT F16") for i in plan.node]
                parts = list(zip(names, event.dur, strict=True))
            else:
                continue
            sums: dict[int | str, float] = {}
            for key, ns in parts:
                sums[key] = sums.get(key, 0) + ns
            for key, total in sums.items():
                found.setdefault(key, [0.0] * len(steps))[side] = total
    return found


def test_a_change_in_the_middle_is_reported_although_the_ends_are_equal(tmp_path):
    found = slowed_logs(tmp_path, (1, 1.5, 1.5, 1))
    title = found.reports[0].title
    assert title.startswith("B decodes 0.667 times as fast as A (")
    assert "; D decodes 1.5 times as fast as C (" in title
    assert title.endswith(". From A to D: no difference beyond the noise in decode.")
    assert "No change" not in title
    assert [figure for name, figure in found.reports[1].figures.items() if "blocks" in name] == [
        (12, "count")
    ] * 4
    assert "no change" not in slowed_logs(tmp_path, (1, 1.5, 1.5)).reports[0].title
    (chart,) = slowed_logs(tmp_path, (1, 2, 1.5)).charts
    assert re.findall(r"width:([\d.]+)%", chart.markup) == ["50.0", "100.0", "75.0"]


def test_a_setting_of_the_middle_side_differs(tmp_path):
    logs = [steady_log(i) for i in range(3)]
    for event in logs[1]:
        if isinstance(event, s.Context):
            event.type_k = "q8_0"
    first = trend(tmp_path, logs).reports[0]
    assert [row[2] for row in first.rows] == ["f16", "q8_0", "f16"]


def test_a_phase_with_too_few_steps_has_its_parts_on_request(tmp_path):
    """With one step per log, the noise is not known."""
    log = steady_log(1)
    first = min(e.step for e in log if isinstance(e, s.StepBegin))
    alone = [e for e in log if getattr(e, "step", first) == first]
    alone = [e for e in alone if getattr(e, "compute", first) == first]
    sessions = [[session_of(tmp_path / f"{i}.log", alone)] for i in range(3)]
    assert len(compute_trend(sessions).reports) == 2
    reports = compute_trend(sessions, phase="decode").reports
    assert [report.title.partition(",")[0] for report in reports[2:]] == [
        "Decode by block", "Decode by op",
    ]  # fmt: skip
    assert "too few steps to tell in decode" in reports[0].title
    assert "Fewer than 5 blocks do not show the noise" in " ".join(reports[1].notes)


def test_the_settings_that_differ_stand_beside_the_logs(tmp_path):
    logs = [steady_log(i) for i in range(3)]
    for event in logs[2]:
        if isinstance(event, s.Context):
            event.n_threads = 7
    first = trend(tmp_path, logs).reports[0]
    assert first.notes == ["Each log: the log was not closed."]
    assert [column.name for column in first.columns] == ["side", "log", "threads"]
    assert [[row[0], Path(str(row[1])).name, row[2]] for row in first.rows] == [
        ["A", "v0.log", "3"], ["B", "v1.log", "3"], ["C", "v2.log", "7"],
    ]  # fmt: skip


def test_logs_of_a_group_that_were_recorded_differently_are_named(tmp_path):
    sides = []
    for side in range(3):
        events = [steady_log(2 * side), steady_log(2 * side + 1)]
        for event in events[1]:
            if isinstance(event, s.Context):
                event.n_threads += side == 1
        sides.append([session_of(tmp_path / f"{side}-{i}.log", of) for i, of in enumerate(events)])
    for found in (compute_trend(sides), compute_diff(sides[0], sides[1])):
        assert "B: its logs differ in their settings: threads." in found.reports[0].notes
        assert not any("Recorded alike" in note for note in found.reports[0].notes)


def test_names_of_many_sides():
    named = letters(60)
    assert (named[0], named[25:28], named[-1]) == ("A", ["Z", "AA", "AB"], "BH")
    assert len(set(named)) == 60


# --- the command ---


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions, the second slower than the others: a log and a group of each."""
    directory = tmp_path_factory.mktemp("versions")
    for i, factor in enumerate((1, 1.3, 1.1)):
        write(directory / f"v{i}.log", slowed(steady_log(i, 0.005), factor))
        group(directory, f"v{i}-", range(5 * i, 5 * i + 5), factor, 0.005)
    return directory


@pytest.fixture
def three(versions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(versions)


def groups(*numbers: int) -> list[str]:
    """Group 0 before, then the others."""
    before, *later = ([f"v{i}-{n}.log" for n in range(5 * i, 5 * i + 5)] for i in numbers)
    return ["--before", *before, *(word for after in later for word in ("--after", *after))]


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize("several", [False, True])
def test_three_versions_in_every_form(several: bool) -> None:
    versions = groups(0, 1, 2) if several else ["v0.log", "v1.log", "v2.log"]
    text = printed("diff", *versions)
    assert text.startswith("B decodes 0.7")
    assert max(map(len, text.splitlines())) <= 80
    steps_alone = ("diff", *versions, "--by", "phase")
    first, steps = json_reports(*steps_alone)
    assert " C decodes 0.9" in first["title"]
    factors = [row["/ first"] for row in steps["rows"]]
    assert factors == [None, pytest.approx(1.3, rel=0.02), pytest.approx(1.1, rel=0.02)]
    assert steps["units"]["median step"] == "ns"
    (row, *_) = list(csv.DictReader(printed(*steps_alone, "--csv").splitlines()))[1:]
    assert float(row["/ previous"]) == steps["rows"][1]["/ previous"]
    page = printed(*steps_alone, "--html")
    assert page.count('class="bars"') == 1
    assert "v0-0.log and 4 more" in page if several else "C: v2.log" in page


@pytest.mark.usefixtures("three")
def test_fail_above_judges_the_last_version_against_the_first() -> None:
    for versions, status in (
        (("v0.log", "v1.log", "v2.log"), 0),  # 1.1 with an interval that begins below 1.05
        (("v0.log", "v2.log", "v1.log"), 1),
        (groups(0, 1, 2), 1),
        (groups(1, 2, 0), 0),
    ):
        done = instr_here("diff", *versions, "--by", "phase", "--fail-above", "5%")
        assert done.returncode == status, versions


def test_parts_of_a_session_are_one_log_unless_there_is_no_other(tmp_path: Path) -> None:
    rotated = make_log(lambda _low, high: high, n_contexts=2, level="detailed")
    paths = [tmp_path / f"server{part}.log" for part in ("", ".part2", ".part3")]
    for path, events in zip(paths, split_log(rotated, 3, Random(3)), strict=True):
        write(path, events)
    other = write(tmp_path / "other.log", make_log(Random(3).randint, 1, "detailed"))
    pair = json_reports("diff", *paths, other)
    assert pair[0]["rows"][0]["B"] == str(other)
    assert pair[1]["figures"]["decode steps of A"]["value"] == len(decodes(paths))
    parts = json_reports("diff", *paths)
    assert [row["log"] for row in parts[0]["rows"]] == [str(path) for path in paths]


def decodes(paths: Sequence[Path]) -> list[dict]:
    events = [event for path in paths for event in read_events(path)]
    return [e for e in events if e["event"] == "step_begin" and e["phase"] == "decode"]


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*groups(0, 1), "--after", "v2.log"], "all of at least two"),
        ([*groups(0, 1, 2), "--by", "tensor"], "a trend has block, op, layer"),
        (["--before", "v0.log", "v0.log", *groups(1, 2)[6:]], "v0.log and v0.log are the same"),
        ([*groups(0, 1), "--before", "v2.log"], "--before once, then --after"),
        (["v0.log", *groups(0, 1)], "two or more logs, or groups"),
        (["v0.log"], "only one log"),
        ([], "two or more logs, or groups"),
        (["-", "v0.log", "-"], "only one of the logs can be standard input"),
        (["v0.log", "v1.log", "none.log"], "none.log: no such file"),
    ],
)
def test_wrong_input_is_one_line(words: list[str], message: str) -> None:
    assert message in refusal("diff", *words)


def test_a_perturbed_log_is_refused(tmp_path: Path) -> None:
    events = steady_log(1)
    start = msgspec.structs.replace(events[0], perturbed=True)  # type: ignore[type-var]
    with pytest.raises(UsageError, match=r"2.log: .*--stats"):
        trend(tmp_path, (events, events, [start, *events[1:]]))
