"""`llamacpp_instr.load`: its figures are those of the commands, and it raises one clear error."""

from __future__ import annotations

import html
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

import llamacpp_instr
from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import load_session
from llamacpp_instr.prediction.probe.file import probe_json
from llamacpp_instr.report.report import shown
from tests.exports.test_late_tables import check_requests
from tests.kit.in_process import json_reports, printed
from tests.kit.made_log import make_log
from tests.kit.made_probe import probe_of
from tests.kit.reports import Row
from tests.kit.split_log import split_log
from tests.kit.steady_log import slowed, steady_log, write

mpl.use("agg")
RECORDED = Path(__file__).parent.parent / "fixtures" / "demo-verbose.log"
HOSTILE = "<script>alert(1)</script>\x1b[31m"


def tables(command: str, log: Path) -> dict[str, Row]:
    return {report["title"]: report for report in json_reports(command, log)}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    """Without a probe, whatever this machine's user has."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LLAMACPP_INSTR_CACHE", str(cache))
    return cache


def test_it_shows_the_summary():
    log = llamacpp_instr.load(RECORDED)
    markup = log._repr_html_()
    summary = tables("summary", RECORDED)
    for report in summary.values():
        assert f"<h4>{report['title']}</h4>" in markup
        for row in report["rows"]:
            for name, cell in row.items():
                if isinstance(cell, int | float) and report["units"].get(name) == "ns":
                    assert f'data-value="{cell!r}">{shown(cell, "ns")}</td>' in markup
    assert "Findings" not in summary
    assert list(log.findings) == ["rule", "what", "share", "of", "advice"]
    assert log.findings.empty
    check_requests(RECORDED, log.requests)
    pd.testing.assert_frame_equal(log.requests, log.tables.requests)
    assert repr(log) == f"<{RECORDED}: {len(log.tables.steps)} steps, 1 request>"


def test_kernels_add_up_to_the_statistics_and_name_their_request():
    log = llamacpp_instr.load(RECORDED)
    stats, *_ = json_reports("stats", RECORDED, "--by", "op")
    by_label = log.kernels.groupby("label", observed=True)
    assert by_label.dur.sum().to_dict() == {row["op"]: row["total"] for row in stats["rows"]}
    assert by_label.size().to_dict() == {row["op"]: row["count"] for row in stats["rows"]}
    assert (set(log.kernels.request), set(log.kernels.sequence)) == ({1}, {0})
    assert list(log.kernels.columns) == [*log.tables.ops.columns, "request", "sequence"]


def test_the_findings_are_those_of_the_summary(tmp_path):
    path = write(tmp_path / "session.log", make_log(Random(0).randint, 2))
    (finding,) = llamacpp_instr.load(path).findings.itertuples()
    (row,) = tables("summary", path)["Findings"]["rows"]
    assert (finding.of, finding.share) == (row["Costs"], row["share"])
    assert row["why, and what to try"] == f"{finding.what} {finding.advice}"


def test_a_diff_is_that_of_the_command(tmp_path):
    for name, factor in (("a.log", 1.0), ("b.log", 1.3)):
        write(tmp_path / name, slowed(steady_log(1, noise=0.01), factor))
    a, b = (llamacpp_instr.load(tmp_path / name) for name in ("a.log", "b.log"))
    shown = printed("diff", tmp_path / "a.log", tmp_path / "b.log", "--by", "op")
    found = a.diff(b, by="op")
    assert repr(found) == shown
    assert found._repr_html_().count("<table") == sum(len(of) > 0 for of in found.tables.values())
    reports = json_reports("diff", tmp_path / "a.log", tmp_path / "b.log", "--by", "op")
    for table, report in zip(found.tables.values(), reports, strict=True):
        assert table.to_numpy().tolist() == [list(row.values()) for row in report["rows"]]
    assert {"op", "ratio", "verdict"} <= set(found.tables["decode_by_op"])
    with pytest.raises(InstrError, match="not all of the 2 logs have encode steps"):
        a.diff(b, phase="encode")


def test_the_help_of_the_tables_names_every_column():
    tables = llamacpp_instr.load(RECORDED).tables
    words = set(re.findall(r"\w+", pydoc.render_doc(tables)))
    for name, frame in vars(tables).items():
        assert {name, *frame.columns} <= words, name


def test_a_probe_of_this_machine_counts_as_in_the_commands(cache, tmp_path):
    cpu = load_session(RECORDED).start.host.cpu
    (cache / "probe.json").write_bytes(probe_json(probe_of(cpu)))
    log = llamacpp_instr.load(RECORDED)
    rows = tables("summary", RECORDED)["Findings"]["rows"]
    assert log.findings.of.tolist() == [row["Costs"] for row in rows] != []
    assert f"{html.escape(rows[0]['Costs'])}</td>" in log._repr_html_()
    log.page(tmp_path / "session.html")
    assert (tmp_path / "session.html").read_text() == printed("page", RECORDED, "-o", "-")


def test_a_plot_has_the_numbers_of_the_commands():
    log = llamacpp_instr.load(RECORDED)
    summary = tables("summary", RECORDED)
    medians = {row["Phase"]: row["tokens/s median"] for row in summary["Speed"]["rows"]}
    drawn = {line.get_label(): line.get_ydata() for line in log.plot_speed().get_lines()}
    assert {phase: float(np.median(y)) for phase, y in drawn.items()} == medians

    lines = {line.get_label(): line.get_ydata() for line in log.plot_requests().get_lines()}
    latency = tables("requests", RECORDED)["Latency of requests"]["rows"]
    expected = {row["Time"]: row["longest"] / 1e9 for row in latency if row["Time"] in lines}
    assert {label: max(y) for label, y in lines.items()} == pytest.approx(expected)

    axes = log.plot_blocks()
    where = summary["Where the time went"]["rows"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [r["Block"] for r in where]
    for bars in axes.containers:
        spent = [row[bars.get_label()] / 1e6 for row in where]
        assert [bar.get_width() for bar in bars] == pytest.approx(spent)
    assert log.plot_speed(axes) is axes


def test_the_page_is_that_of_the_command(tmp_path):
    path = tmp_path / "session.html"
    log = llamacpp_instr.load(RECORDED)
    log.page(path)
    assert path.read_text() == printed("page", RECORDED, "-o", "-")
    with pytest.raises(InstrError, match=r"session\.html exists; pass force=True"):
        log.page(path)
    log.page(path, force=True)
    with pytest.raises(InstrError, match="would overwrite the input"):
        log.page(RECORDED, force=True)


def test_hostile_names_stay_text(tmp_path):
    made = make_log(Random(3).randint, 1, "minimal")
    hostile = [replace(e, name=HOSTILE) if isinstance(e, s.Mark | s.Model) else e for e in made]
    log = llamacpp_instr.load(write(tmp_path / "\x1b[31m<b>.log", hostile))
    assert (log.tables.marks.name == HOSTILE).any()
    markup = log._repr_html_()
    assert "&lt;script&gt;alert(1)" in markup
    for wrong in ("<script", "<b>", "\x1b"):
        assert wrong not in markup
    assert "\x1b" not in repr(log)


def test_parts_are_one_session(tmp_path):
    random = Random(7)
    events = make_log(random.randint, 2)
    split = split_log(events, 3, random)
    parts = [write(tmp_path / f"{i}.log", of) for i, of in enumerate(split)]
    assert len(parts) == 3
    steps = llamacpp_instr.load(*parts[::-1]).tables.steps
    assert sorted(steps.step) == sorted(e.step for e in events if isinstance(e, s.StepEnd))
    with pytest.raises(InstrError, match="are different sessions; load each on its own"):
        llamacpp_instr.load(parts[0], RECORDED)


def test_wrong_input_is_one_clear_error(tmp_path):
    damaged = tmp_path / "damaged.log"
    lines = RECORDED.read_text().splitlines()
    damaged.write_text("\n".join([*lines[:100], "{", *lines[100:]]))
    with pytest.raises(InstrError, match=r"damaged\.log:101: "):
        llamacpp_instr.load(damaged)
    assert len(llamacpp_instr.load(damaged, lenient=True).tables.steps) == 24
    with pytest.raises(InstrError, match="no such file"):
        llamacpp_instr.load(tmp_path / "none.log")
    log = llamacpp_instr.load(write(tmp_path / "empty.log", make_log(Random(3).randint, 1)[:1]))
    assert "<table" in log._repr_html_()
    for plot in (log.plot_speed, log.plot_requests, log.plot_blocks):
        with pytest.raises(InstrError, match="nothing to plot: the log has no "):
            plot()


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InstrError, match=r'pip install "llamacpp-instr\[report\]"'):
        llamacpp_instr.load(RECORDED).plot_speed()


@pytest.mark.native
def test_it_is_imported_when_it_is_used():
    code = "import llamacpp_instr, sys; print('converters' in sys.modules, llamacpp_instr.load)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False <function load"), done.stdout
