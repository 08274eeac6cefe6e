"""`instr compare`: every row follows from the files, the weights and the logs."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.converters.analyses.compare import (
    Candidate,
    Pair,
    Row,
    compute_comparison,
    more_or_fewer,
)
from llamacpp_instr.converters.analyses.diff import compute_diff
from llamacpp_instr.converters.analyses.memory import stored_in_file
from llamacpp_instr.converters.analyses.step_times import (
    PhaseUses,
    StepTimes,
    Use,
    compute_use_times,
    rates_of,
)
from llamacpp_instr.lab.weights.measure import compute_weight_errors
from llamacpp_instr.log.reader import read_events as typed_events
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.report.render import render_text
from llamacpp_instr.report.report import Report
from tests.conftest import Instr, assert_refused, read_events
from tests.kit.in_process import json_reports, printed
from tests.kit.quantized_kit import quantized_demo
from tests.kit.split_log import split_log
from tests.kit.steady_log import write

pytestmark = pytest.mark.native

RUN = ("-p", "Once upon a time", "-n", "12", "--repeat", "3", "--threads", "1")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A session of the demo model in two file types."""
    directory = tmp_path_factory.mktemp("compare")
    found = {name: directory / f"{name}.log" for name in ("Q8_0", "Q4_K_M")}
    for file_type, log in found.items():
        printed("run", quantized_demo(file_type), *RUN, "--log", log)
    return found


def candidate(file_type: str, log: Path | None = None, errors: bool = False) -> Candidate:
    file = load_model_file(quantized_demo(file_type))
    found = compute_weight_errors(load_model_file("demo"), file) if errors else []
    return Candidate(
        file_type,
        stored_in_file(file),
        file,
        [load_session(log)] if log else [],
        errors={error.name: error for error in found},
    )


def row_of(rows: list[Row], name: str) -> Row:
    (row,) = [row for row in rows if row.name == name]
    return row


def report_of(reports: list[Report], words: str) -> Report:
    (report,) = [report for report in reports if words in report.title]
    return report


def test_a_row_by_hand() -> None:
    """blk.0.ffn_down has 768 rows of 256; Q8_0 has 34 bytes per 32 elements, Q4_K 144 per 256."""
    pair = Pair(candidate("Q8_0", errors=True), candidate("Q4_K_M", errors=True))
    row = row_of(pair.tensors(), "blk.0.ffn_down")
    assert (row.a.types, row.b.types) == ("Q8_0", "Q4_K")
    assert (row.a.n_bytes, row.b.n_bytes) == (256 * 768 // 32 * 34, 256 * 768 // 256 * 144)
    assert row.change == pytest.approx(144 / (8 * 34) - 1)
    assert more_or_fewer(row.change) == "47 % fewer bytes"
    errors = {error.name: error for error in pair.b.errors.values()}
    assert row.b.sqnr_db == errors["blk.0.ffn_down.weight"].sqnr_db


def test_rolled_up_rows_are_sums_of_their_tensors() -> None:
    pair = Pair(candidate("Q8_0", errors=True), candidate("Q4_K_M", errors=True))
    tensors = {row.name: row for row in pair.tensors()}
    for row in pair.by(lambda tensor: tensor.role):
        own = [of for name, of in tensors.items() if name.rpartition(".")[2] == row.name]
        assert row.b.n_bytes == sum(of.b.n_bytes for of in own), row.name
    whole = pair.whole()
    file = load_model_file(quantized_demo("Q4_K_M"))
    assert whole.b.n_bytes == file.n_bytes
    # pooled: noise and signal are summed before they are divided
    noise = signal = 0.0
    for error in pair.b.errors.values():
        noise, signal = noise + error.sums.e2, signal + error.sums.x2
    assert whole.b.sqnr_db == pytest.approx(10 * math.log10(signal / noise))


def test_times_are_those_of_the_log(logs: dict[str, Path]) -> None:
    """Medians over steps of the kernels that read a weight, computed naively from the JSON."""
    for file_type, log in logs.items():
        session = load_session(log)
        times = StepTimes(session)
        uses = PhaseUses([times], "decode")
        naive = naive_uses(log, set(times.steps["step"][times.steps["phase"] == "decode"].tolist()))
        assert {tuple(use) for use in uses.row} == set(naive), file_type
        for use, by_step in naive.items():
            group = uses.group([Use(*use)])
            assert group is not None
            assert sorted(group[0].tolist()) == sorted(by_step), use


def naive_uses(log: Path, steps: set[int]) -> dict[tuple[str, str], list[int]]:
    """ns of each step, by the first weight that a kernel reads and the op that reads it."""
    events = read_events(log)
    graphs = {event["graph"]: event for event in events if event["event"] == "graph"}
    plans = {event["plan"]: event for event in events if event["event"] == "plan"}
    step_of = {e["compute"]: e["step"] for e in events if e["event"] == "compute" and "step" in e}
    found: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for event in events:
        if event["event"] != "ops" or step_of.get(event["compute"]) not in steps:
            continue
        plan = plans[event["plan"]]
        graph = graphs[plan["graph"]]
        counts = plan.get("n") or [1] * len(plan["node"])
        for first, n, dur in zip(plan["node"], counts, event["dur"], strict=True):
            reads = [
                (graph["leafs"][-1 - source]["name"], graph["nodes"]["op"][node])
                for node in range(first, first + n)
                for source in graph["nodes"]["src"][node]
                if source < 0 and graph["leafs"][-1 - source].get("tensor", -1) >= 0
            ]
            if reads:
                found[reads[0]][step_of[event["compute"]]] += dur
    return {use: list(by_step.values()) for use, by_step in found.items()}


def test_rates_are_work_by_time(logs: dict[str, Path]) -> None:
    """A decode multiplies each element of the matrix once (2 operations) and reads it once."""
    uses = PhaseUses([StepTimes(load_session(logs["Q8_0"]))], "decode")
    use = Use("blk.1.ffn_up.weight", "MUL_MAT")
    group = uses.group([use])
    assert group is not None
    rates = rates_of(group)
    median = float(np.median(2 * 256 * 768 / group[0])) * 1e9
    assert rates.flops == pytest.approx(median)
    moved = load_model_file(quantized_demo("Q8_0")).by_name[use.weight].n_bytes + 4 * (256 + 768)
    assert rates.bytes == pytest.approx(float(np.median(moved / group[0])) * 1e9)


def test_a_session_against_itself_has_no_difference(logs: dict[str, Path]) -> None:
    uses = PhaseUses([StepTimes(load_session(logs["Q4_K_M"]))], "decode")
    for times in compute_use_times(uses, uses, [[use] for use in uses.row]):
        assert times is not None
        assert times.ratio.value == 1
        assert not times.ratio.differs


def test_sessions_of_one_model_are_joined(logs: dict[str, Path]) -> None:
    one = StepTimes(load_session(logs["Q8_0"]))
    alone, twice = PhaseUses([one], "decode"), PhaseUses([one, one], "decode")
    assert twice.time.shape[1] == 2 * alone.time.shape[1]
    assert len(set(twice.blocks.block.tolist())) >= len(set(alone.blocks.block.tolist()))


def on_machine(log: Path, copy: Path, delay: int) -> Session:
    """The session as if its threads had waited for a CPU for `delay` ns of every microsecond."""
    lines = []
    for event in read_events(log):
        if event["event"] != "machine":
            lines.append(event)
        if event["event"] == "step_end":
            lines.append({"event": "machine", "t": event["t"], "dur": 1000, "cpu": 1000 - delay,
                          "delay": delay, "nvcsw": 0, "nivcsw": 2})  # fmt: skip
    copy.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return load_session(copy)


def test_a_disturbed_machine_is_named_as_diff_names_it_and_is_noise(
    logs: dict[str, Path], tmp_path: Path
) -> None:
    quiet = on_machine(logs["Q8_0"], tmp_path / "quiet.log", 0)
    busy = on_machine(logs["Q8_0"], tmp_path / "busy.log", 300)
    named = [
        note for note in compute_diff([quiet], [busy]).reports[0].notes if "descheduled" in note
    ]
    assert "lost 30 % of its CPU time to other work" in named[0]
    plain = candidate("Q8_0")
    taken, intervals = [], []
    for sessions, who in (
        ([quiet], None),
        ([busy], "Q8_0: "),
        ([quiet, quiet], None),
        ([quiet, busy], "Q8_0, 1 of 2 logs: "),
    ):
        first, other = (replace(plain, sessions=of) for of in ([quiet], sessions))
        notes = [
            note for note in compute_comparison([first, other])[0].notes if "descheduled" in note
        ]
        assert notes == [note.replace("B: ", who) for note in named if who]
        pair = Pair(first, other)
        taken.append(pair.phases["decode"][1].taken)
        ratio, tensor = pair.step_ratio("decode"), pair.tensors()[5].times["decode"].ratio
        intervals.append([math.log(of.high / of.value) for of in (ratio, tensor)])
    # one of two sessions: half of the time
    assert taken == pytest.approx([0, 0.3, 0, 0.15])
    for none, one, two, half in zip(*intervals, strict=True):
        assert none < one
        assert two < half
        assert one > -math.log(1 - 0.3)


def test_the_tables_of_three_models() -> None:
    several = [candidate(of) for of in ("Q8_0", "Q4_K_M", "Q2_K")]
    reports = compute_comparison(several)
    assert reports[0].title == "2 models against Q8_0"
    assert reports[0].notes[0] == "Q4_K_M against Q8_0: 42 % fewer bytes."
    layers = report_of(reports, "types by layer")
    assert [row[0] for row in layers.rows if row[0] != -1] == [0, 1, 2, 3]
    tensors = report_of(reports, "Q2_K against Q8_0, by tensor")
    assert len(tensors.rows) == 39


def test_models_that_share_nothing(models: Path) -> None:
    other = load_model_file(models / "t5.gguf")
    with pytest.raises(UsageError, match=r"token_embd.weight has the shape"):
        compute_comparison([candidate("Q8_0"), Candidate("t5", stored_in_file(other), other)])
    nothing = Candidate("none", replace(stored_in_file(other), tensors=[]))
    with pytest.raises(UsageError, match="no tensor in common"):
        compute_comparison([candidate("Q8_0"), nothing])


# --- the command ---


def test_two_models_and_their_logs(logs: dict[str, Path]) -> None:
    models = [quantized_demo("Q8_0"), quantized_demo("Q4_K_M")]
    given = [arg for log in logs.values() for arg in ("--log", log)]
    lines = printed("compare", *models, *given, "--reference", "demo").splitlines()
    assert max(map(len, lines)) <= 80
    assert "SQNR is relative to demo.gguf." in " ".join(lines)
    (line,) = [line for line in lines if " blk.2.ffn_up " in line]
    assert "Q8_0 → Q4_K" in line
    assert "47 % fewer" in line
    assert "45.4 → 23.0" in line

    reports = json_reports("compare", *models, *given, "--reference", "demo")
    (row,) = [row for row in reports[-1]["rows"] if row["tensor"] == "blk.2.ffn_up"]
    assert row["B bytes"] == 110592
    assert row["decode A"] > 0
    assert row["decode FLOP/s B"] == pytest.approx(2 * 256 * 768 / row["decode B"] * 1e9, rel=0.5)


def test_several_logs_of_a_model(logs: dict[str, Path], tmp_path: Path) -> None:
    """Runs count together: with a log and its copy of another process, the medians are the same.
    The parts of a log are one log. The models may come last."""
    models = [quantized_demo("Q8_0"), quantized_demo("Q4_K_M")]
    q8, q4 = logs.values()
    again = tmp_path / "again.log"
    again.write_text(another_process(q8))
    one = json_reports("compare", *models, "--log", q8, "--log", q4)
    two = json_reports("compare", "--log", q8, again, "--log", q4, *models)
    for row, same in zip(one[-1]["rows"], two[-1]["rows"], strict=True):
        assert row["tensor"] == same["tensor"]
        assert row["decode A"] == same["decode A"]
    assert one[0]["rows"] == two[0]["rows"]
    assert "logs differ in their settings" not in str(two)

    parts = [tmp_path / "q4.log", tmp_path / "q4.part2.log"]
    split = split_log([event for _, event in typed_events(q4)], 2, Random(1))
    for path, events in zip(parts, split, strict=True):
        write(path, events)
    of_parts = json_reports("compare", *models, "--log", q8, "--log", *reversed(parts))
    assert [of["rows"] for of in of_parts] == [of["rows"] for of in one]

    again.write_text(another_process(q8).replace('"n_threads":1,', '"n_threads":2,'))
    of_threads = json_reports("compare", *models, "--log", q8, again, "--log", q4)
    assert "Q8_0: its logs differ in their settings: threads." in str(of_threads)


def another_process(log: Path) -> str:
    first, _, others = log.read_text().partition("\n")
    start = json.loads(first) | {"id": "another"}
    return f"{json.dumps(start)}\n{others}"


def test_two_logs_alone(logs: dict[str, Path]) -> None:
    text = printed("compare", *logs.values())
    # the files still exist, so errors are computed, against the first
    assert "SQNR 23." in " ".join(text.split())
    assert "decode" in text


def test_logs_whose_models_are_gone(logs: dict[str, Path], tmp_path: Path) -> None:
    for log in logs.values():
        text = log.read_text().replace(str(quantized_demo("Q8_0").parent), "/gone")
        (tmp_path / log.name).write_text(text)
    text = printed("compare", *(tmp_path / log.name for log in logs.values()))
    assert "SQNR" not in text
    assert "42 % fewer bytes" in text


def test_quantize_run_and_compare_in_one_go(instr: Instr, tmp_path: Path) -> None:
    done = instr(
        "compare", "--types", "Q4_K_M", "demo", "--rounds", "2", "-n", "8", "--threads", "1",
        "--keep", "kept", "-o", "c.html",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        "F16-1.log", "F16-2.log", "Q4_K_M-1.log", "Q4_K_M-2.log", "demo-Q4_K_M.gguf",
    ]  # fmt: skip
    for log in (tmp_path / "kept").glob("*.log"):
        steps = load_session(log).steps
        of_steps = list(zip(steps["phase"].tolist(), steps["n_tokens"].tolist(), strict=True))
        assert of_steps == [("prefill", 504), *[("decode", 1)] * 7] * 3, "its context holds 512"
    page = (tmp_path / "c.html").read_text()
    assert page.count("<svg") == 3
    assert "prefills 504 tokens" in page
    assert "Q4_K_M against F16: 69 % fewer bytes" in page
    again = instr("compare", "--types", "Q4_K_M", "demo", "--keep", "kept")
    assert_refused(again, "F16-1.log exists", "--force")


def test_wrong_input(instr: Instr, logs: dict[str, Path], models: Path, tmp_path: Path) -> None:
    q8, q4 = quantized_demo("Q8_0"), quantized_demo("Q4_K_M")
    assert_refused(instr("compare", q8), "only one model")
    assert_refused(instr("compare", q8, q4, "--log", logs["Q8_0"]), "2 models are given, but 1")
    swapped = [arg for log in reversed(logs.values()) for arg in ("--log", log)]
    twice = ["--log", logs["Q8_0"], logs["Q8_0"], "--log", logs["Q4_K_M"]]
    assert_refused(instr("compare", q8, q4, *twice), "same part of one session; leave one out")
    assert_refused(instr("compare", q8, q4, *swapped), "recorded a model other", "q4_k".upper())
    assert_refused(instr("compare", q8, models / "llama.gguf"), "not versions of the same model")
    assert_refused(instr("compare", "--types", "Q4_K_M,Q9", "demo"), "Q9")
    assert_refused(instr("compare", "--types", "Q4_0,Q4_0", "demo"), "twice")
    assert_refused(instr("compare", "--types", "Q4_0", q8, q4), "one MODEL")
    again = instr("compare", "--types", "Q4_0", q8)
    assert_refused(again, "already quantized", "or use `instr quantize --allow-requantize`")
    needy = instr("compare", "--types", "IQ2_XS", "demo")
    assert needy.returncode == 2
    begun, why = needy.stderr.splitlines()
    assert begun == "quantizing demo.gguf to IQ2_XS"
    assert "compute one with `instr imatrix`" in why
    long = instr("compare", "--types", "Q4_0", "demo", "-p", "a " * 600, "--rounds", 1)
    assert "the context holds 512; make the context larger" in long.stderr
    assert "--ctx" not in long.stderr
    assert_refused(instr("compare", q8, tmp_path / "none.gguf"), "does not exist")
    assert_refused(instr("compare", q8, q4, "-n", "3"), "-n has no effect without --types")
    assert_refused(instr("compare", q8, q4, "--keep", "d"), "--keep has no effect")
    assert_refused(instr("compare", "--types", "Q4_0", "demo", "-n", "-1"), "-n is -1")
    assert_refused(instr("compare", q8, ""), "the path is empty")
    (tmp_path / "c.md").write_text("mine")
    assert_refused(instr("compare", q8, q4, "-o", "c.md"), "--force")


def test_what_is_shown_fits_in_80_columns() -> None:
    reports = compute_comparison([candidate("Q8_0"), candidate("Q2_K")], every_tensor=False)
    assert max(map(len, render_text(reports).splitlines())) <= 80
