"""The comparison of two sessions: a session with itself gives 1, an injected factor is found, noise
is not called a difference."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from scipy import stats

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.diff import VIEWS, Diff, answer, compute_diff
from llamacpp_instr.converters.analyses.noise import Ratio
from llamacpp_instr.converters.analyses.step_times import ALIKE, StepTimes, compute_settings
from llamacpp_instr.log import schema as s
from llamacpp_instr.report.render import render_text
from llamacpp_instr.report.report import Report
from tests.conftest import Instr, assert_refused
from tests.kit.in_process import json_reports
from tests.kit.reports import rows, session_of
from tests.kit.steady_log import KERNEL_NS, scaled, slowed, steady_log, write
from tests.kit.strategies import logs


def diff(directory: Path, a: list[s.Event], b: list[s.Event], **chosen: object) -> Diff:
    sides = session_of(directory / "a.log", a), session_of(directory / "b.log", b)
    return compute_diff(*([side] for side in sides), **chosen)  # type: ignore[arg-type]


def ratios(found: Diff) -> dict[tuple[str, object], list]:
    """Rows of the tables of figures by title and label: A, B, B / A, from, to, the word."""
    tables = [r for r in found.reports if any(c.name == "B / A" for c in r.columns)]
    return {(r.title, row[0]): row[1:] for r in tables for row in r.rows}


@given(events=logs())
@settings(max_examples=10)
def test_a_session_does_not_differ_from_itself(events, tmp_path_factory):
    session = session_of(tmp_path_factory.mktemp("log") / "a.log", events)
    if not len(session.steps):
        with pytest.raises(UsageError, match="that count"):
            compute_diff([session], [session])
        return
    for by in VIEWS if session.ops else ("phase", "layer"):
        found = compute_diff([session], [session], by=by)
        assert not [r.title for r in found.reports if r.title.startswith("Only in")]
        for values in ratios(found).values():
            assert values[2] == 1
            assert values[-1] in ("within noise", "too few to tell", "too noisy to tell")
        assert found.slower_by(0) == []


@given(a=logs(), b=logs())
@settings(max_examples=10)
def test_swapping_the_sides_inverts_every_ratio(a, b, tmp_path_factory):
    directory = tmp_path_factory.mktemp("log")
    sides = session_of(directory / "a.log", a), session_of(directory / "b.log", b)
    try:
        forth = compute_diff(*([side] for side in sides), by="layer")
    except UsageError:
        return  # no phase in both
    back = ratios(compute_diff(*([side] for side in sides[::-1]), by="layer"))
    for key, (of_a, of_b, ratio, low, high, _) in ratios(forth).items():
        assert back[key][:2] == [of_b, of_a]
        if ratio and back[key][2]:
            assert back[key][2] == pytest.approx(1 / ratio)
        if low is not None and back[key][3] is not None:
            assert back[key][3:5] == pytest.approx([1 / high, 1 / low])


def test_a_factor_on_one_op_is_seen_there_and_nowhere_else(tmp_path):
    log = steady_log(1, noise=0.01)
    found = diff(tmp_path, log, scaled(log, "FLASH_ATTN_EXT", 1.2), by="op", phase="decode")
    for (title, label), values in ratios(found).items():
        if label == "FLASH_ATTN_EXT":
            assert values[2] == pytest.approx(1.2, abs=1e-6)
            assert values[-1] == "slower"
        else:
            assert values[2] == 1.0, (title, label)
            assert values[-1] == "within noise"
    assert found.slower_by(0) == [], "the steps themselves took as long"


def short_kernels(log: list[s.Event], products: int, layers: dict[int, int]) -> list[s.Event]:
    """The log with kernels of 100 ns, except for products of `products` ns; with these layers, and
    the second layer of the model renumbered to 12."""
    (nodes,) = [e.nodes for e in log if isinstance(e, s.Graph) and e.nodes is not None]
    (plan,) = [e for e in log if isinstance(e, s.Plan)]
    for event in log:
        if isinstance(event, s.Ops):
            event.dur = [products if nodes.op[i] == "MUL_MAT" else 100 for i in plan.node]
        elif isinstance(event, s.Layers):
            event.layer, event.dur = list(layers), list(layers.values())
    nodes.name = [name.replace("-1", "-12") for name in nodes.name]
    nodes.layer = [12 if layer == 1 else layer for layer in nodes.layer]
    return log


@pytest.mark.parametrize("by", ["block", "layer", "op", "tensor"])
def test_every_row_of_a_view_by_hand(tmp_path, by):
    """Steps are equal: their error is the assumed 2 % and the clock's, uniform within 10 ns for
    each timed interval. The intervals hold for all rows at once."""
    a = short_kernels(steady_log(1), 100, {12: 100, 0: 10**6})
    b = short_kernels(steady_log(1), 200, {12: 200, 0: 10**6})
    (report,) = diff(tmp_path, a, b, by=by, phase="decode").reports[2:]
    labels, rows = [row[0] for row in report.rows], [row[1:] for row in report.rows]
    (nodes,) = [e.nodes for e in a if isinstance(e, s.Graph) and e.nodes is not None]
    kernels = [nodes.op[i] for e in a if isinstance(e, s.Plan) for i in e.node]
    if by == "layer":
        assert labels == [0, 12]
        assert [row[:3] for row in rows] == [[1e6, 1e6, 1.0], [100, 200, 2.0]]
    else:
        assert sum(row[0] for row in rows) == 100 * len(kernels)
        assert sum(row[1] for row in rows) == 100 * (len(kernels) + kernels.count("MUL_MAT"))
    if by == "block":
        order = ["embedding", "attention", "feed-forward", "norm", "kv", "output"]
        assert labels == [block for block in order if block in labels]
        assert len(labels) > 3
    if by == "op":
        assert len(labels) == len(set(kernels))
    if by == "tensor":
        assert len(labels) == len(kernels), "equal kernels of a layer are told apart"
        assert {"blk.12.Qcur ROPE", "blk.12.cache_k SET_ROWS", "blk.0.attn_q MUL_MAT F16"} <= {
            *map(str, labels)
        }
    if by in ("op", "tensor"):
        assert [max(row[:2]) for row in rows] == sorted(
            (max(row[:2]) for row in rows), reverse=True
        )
    for of_a, of_b, ratio, low, high, _ in rows:
        errors = []
        for ns, each in ((of_a, 100), (of_b, 200 if ratio == 2 else 100)):
            n = 1 if by == "layer" else round(of_a / 100)
            mixed = by == "block" and ratio != 1
            tick = 10 * n / ns / math.sqrt(12)
            assert mixed or by == "layer" or ns == n * each
            errors.append(math.hypot(0.02, tick))
        freedom = 20 if ratio == 1 else 19
        reach = stats.t.ppf(1 - 0.05 / 2 / len(rows), freedom) * math.hypot(*errors)
        assert [low, high] == pytest.approx(
            [ratio / math.exp(reach), ratio * math.exp(reach)], rel=0.01
        )


def test_a_phase_with_too_few_steps_has_its_parts_on_request(tmp_path):
    """With one step per log, the noise is not known."""
    log = steady_log(1)
    first = min(e.step for e in log if isinstance(e, s.StepBegin))
    alone = [
        e
        for e in log
        if getattr(e, "step", first) == first and getattr(e, "compute", first) == first
    ]
    assert len(diff(tmp_path, alone, alone).reports) == 2
    asked = diff(tmp_path, alone, alone, phase="decode")
    assert len(asked.reports) == 4
    assert asked.reports[0].title == "Too few steps to tell in decode."


def test_layers_and_blocks_of_one_side_are_named(tmp_path):
    a = short_kernels(steady_log(1), 100, {0: 10**6})
    b = short_kernels(steady_log(1), 100, {0: 10**6, 12: 10**6})
    report = diff(tmp_path, a, b, by="layer").reports[2]
    assert report.notes == ["Only in B: 12."]
    assert [row[0] for row in report.rows] == [0]


def test_what_is_fused_on_one_side_is_compared_as_one(tmp_path):
    found = diff(tmp_path, steady_log(1, fused=True), steady_log(1), by="op")
    values = ratios(found)["Decode by op, median of a step", "RMS_NORM+MUL → RMS_NORM, MUL"]
    assert values[0] == values[1]
    assert values[2] == 1.0
    assert not [r for r in found.reports if r.title.startswith("Only in")]


def test_what_only_one_side_runs_is_listed(tmp_path):
    a = steady_log(1)
    b = copy.deepcopy(a)
    for event in b:
        if isinstance(event, s.Graph) and event.nodes is not None:
            event.nodes.op = ["SOFT_MAX" if op == "FLASH_ATTN_EXT" else op for op in event.nodes.op]
    found = diff(tmp_path, a, b)
    only_in(found, n_kernels := sum(op == "FLASH_ATTN_EXT" for op in ops_of(a)))
    # the same for groups in which the kernel of one log has another speed
    sides = [
        [session_of(tmp_path / f"{name}{i}.log", of) for i, of in enumerate(logs)]
        for name, logs in (("a", [a, steady_log(2)]), ("b", [b, b]))
    ]
    only_in(compute_diff(*sides), n_kernels)


def ops_of(events: list[s.Event]) -> list[str]:
    (nodes,) = [e.nodes for e in events if isinstance(e, s.Graph) and e.nodes is not None]
    return nodes.op


def only_in(found: Diff, n: int) -> None:
    """The two kernels are listed, `n` times in a step, at 100 times the ns of KERNEL_NS each."""
    listed = {r.title[:9]: r for r in found.reports if "Only" in r.title}
    times = {
        name: [[row["Op"], row["times"], row["decode"]] for row in rows(report)]
        for name, report in listed.items()
    }
    ns = pytest.approx(100 * KERNEL_NS["FLASH_ATTN_EXT"] * n)
    assert times == {
        "Only in A": [["FLASH_ATTN_EXT", n, ns]], "Only in B": [["SOFT_MAX", n, ns]],
    }  # fmt: skip


def test_noise_alone_is_rarely_called_a_difference(tmp_path):
    """Whole runs are disturbed at once, as on a real machine; 5 % of the tables may be wrong."""
    sessions = [session_of(tmp_path / f"{i}.log", steady_log(i, 0.03)) for i in range(20)]
    wrong, failed = 0, 0
    for a, b in zip(sessions, [*sessions[1:], sessions[0]], strict=True):
        found = compute_diff([a], [b], by="op")
        wrong += any(values[-1] in ("slower", "faster") for values in ratios(found).values())
        failed += bool(found.slower_by(0))
    # more than 4 of 20 has a probability of 0.003 at 5 %
    assert wrong <= 4
    assert failed <= 2


@pytest.mark.parametrize(("factor", "word"), [(1.3, "slower"), (1 / 1.3, "faster")])
def test_the_first_line_is_the_answer(tmp_path, factor, word):
    log = steady_log(1, noise=0.01)
    found = diff(tmp_path, log, slowed(log, factor), by="phase")
    text = " ".join(render_text(found.reports).split())
    ratio = found.steps["decode"]
    assert (ratio.low > 1) is (word == "slower")
    speed, low, high = (f"{1 / time:.3g}" for time in (ratio.value, ratio.high, ratio.low))
    assert text.startswith(f"B decodes {speed} times as fast ({low} to {high}).")
    text = render_text(found.reports)
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        (["within noise"], ""),
        (["slower", "within noise"], "; 1 of the parts below differs"),
        (["slower", "within noise", "faster"], "; 2 of the parts below differ"),
    ],
)
def test_parts_that_differ_are_counted_where_steps_do_not(tmp_path, words, ending):
    sessions = [StepTimes(session_of(tmp_path / "a.log", steady_log(1)))]
    parts = [Report("", [], [["x", word] for word in words])]
    steps = {"decode": Ratio(1.0, 1.0, 1.0, 0.9, 1.1)}
    text = f"No difference beyond the noise in decode{ending}."
    assert answer(steps, parts, sessions, None) == text


def test_differences_of_the_recordings_stand_before_the_figures(tmp_path):
    a, b = steady_log(1), steady_log(1)
    for event in b:
        if isinstance(event, s.Context):
            event.n_threads, event.type_k, event.flash_attn = 7, "q8_0", False
        elif isinstance(event, s.SessionStart):
            event.producer.commit, event.host.cpu = "another", "Another CPU"
    first = diff(tmp_path, a, b).reports[0]
    named = {row[0]: row[2] for row in first.rows}
    assert {"threads": "7", "K cache": "q8_0", "flash attention": "off"}.items() <= named.items()
    assert named["llama.cpp commit"] == "another"
    assert named["CPU"] == "Another CPU"


@pytest.mark.parametrize("several", [False, True])
def test_an_adapter_is_a_setting_that_differs(tmp_path, several):
    a, b = steady_log(1), steady_log(1)
    for event in b:
        if isinstance(event, s.Graph):
            event.leafs += [
                s.Leaf(name=f"blk.{i}.attn_q.weight.lora_a", type="f32", ne=[256, 8], bytes=8192)
                for i in range(2)
            ]
    sides = [[session_of(tmp_path / f"{i}.log", of)] * (1 + several) for i, of in enumerate((a, b))]
    (row,) = [of for of in compute_diff(*sides).reports[0].rows if of[0] != "log"]
    assert row == ["LoRA adapters", "none", "on 2 weights, rank 8"]


@pytest.mark.parametrize("n", [1, 2])
def test_logs_that_were_recorded_alike_are_named(tmp_path, n):
    a, b = (
        [session_of(tmp_path / f"{name}{i}.log", steady_log(seed + i)) for i in range(n)]
        for name, seed in (("a", 1), ("b", 5))
    )
    more = " and 1 more" * (n - 1)
    found = compute_settings(a, b, ["decode"])
    assert (found.rows, found.notes) == (
        [], [f"A is {a[0].path}{more}, B is {b[0].path}{more}.", ALIKE]
    )  # fmt: skip
    b[0].start.level = "verbose"
    found = compute_settings(a, b, ["decode"])
    assert found.rows == [
        ["log", f"{a[0].path}{more}", f"{b[0].path}{more}"], ["level", "detailed", "verbose"]
    ]  # fmt: skip
    assert found.notes == []


def test_a_log_of_several_models_says_that_they_are_one_here(tmp_path):
    alone = steady_log(1)
    (model,) = [event for event in alone if isinstance(event, s.Model)]
    second = msgspec.structs.replace(model, model=model.model + 1)
    at = alone.index(model) + 1
    log = session_of(tmp_path / "two.log", [*alone[:at], second, *alone[at:]])
    notes = compute_diff([log], [log]).reports[0].notes
    assert sum("two.log recorded 2 models; their steps" in note for note in notes) == 1
    assert "models;" not in " ".join(diff(tmp_path, alone, alone).reports[0].notes)


def test_the_exit_code_is_for_ci(tmp_path, instr: Instr):
    log = steady_log(1, noise=0.005)
    a = write(tmp_path / "a.log", log)
    b = write(tmp_path / "b.log", slowed(log, 1.2))
    done = instr("diff", a, b, "--fail-above", "5%")
    assert done.returncode == 1
    assert done.stderr == "slower by more than 5 %: decode\n"
    assert done.stdout.startswith("B decodes 0.8")
    assert instr("diff", a, b, "--fail-above", "30%").returncode == 0, "above the interval"
    assert instr("diff", b, a, "--fail-above", "5%").returncode == 0, "B is the faster one"
    receiver, sender = os.pipe()
    os.close(receiver)
    command = (sys.executable, "-m", "llamacpp_instr", "diff", a, b, "--fail-above", "5%")
    done = subprocess.run(command, stdout=sender, stderr=subprocess.PIPE, text=True)
    os.close(sender)
    assert (done.returncode, done.stderr) == (1, "slower by more than 5 %: decode\n"), "no reader"


def test_json_has_the_numbers(tmp_path):
    a = write(tmp_path / "a.log", steady_log(1))
    reports = json_reports("diff", a, a)
    assert [row["B / A"] for report in reports for row in report["rows"] if "B / A" in row]
    assert reports[1]["units"]["A"] == "ns"


def test_wrong_input_is_one_line(tmp_path, instr: Instr):
    log = steady_log(1)
    a = write(tmp_path / "a.log", log)
    start = msgspec.structs.replace(log[0], perturbed=True)  # type: ignore[type-var]
    read = write(tmp_path / "stats.log", [start, *log[1:]])
    assert_refused(instr("diff", a, read), "stats.log", "--stats", "must not be compared")
    assert_refused(instr("diff", a, a, "--phase", "encode"), "encode")
    assert_refused(instr("diff", a, a, "--fail-above", "much"), "much", "percentage")
    assert_refused(instr("diff", a, tmp_path / "none.log"), "none.log", "no such file")
    assert_refused(instr("diff", a, a, "-o", a), "--force")
    minimal = [e for e in log if not isinstance(e, (s.Ops, s.Plan))]
    assert_refused(instr("diff", a, write(tmp_path / "m.log", minimal), "--by", "op"), "detailed")


def test_a_table_that_would_be_nearly_empty_is_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr("llamacpp_instr.converters.analyses.step_times.FEW_CELLS", 100)
    monkeypatch.setattr("llamacpp_instr.converters.analyses.step_times.MOST_EMPTY", 5)
    log = steady_log(1)
    at = next(i for i, event in enumerate(log) if isinstance(event, s.Layers))
    session = session_of(tmp_path / "a.log", log)
    assert compute_diff([session], [session], "layer").reports
    many = list(range(1000))
    log[at] = msgspec.structs.replace(log[at], layer=many, dur=[1] * len(many))
    session = session_of(tmp_path / "b.log", log)
    with pytest.raises(UsageError, match="steps share too few of 1,000 parts"):
        compute_diff([session], [session], "layer")
