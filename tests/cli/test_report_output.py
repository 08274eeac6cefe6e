"""Every command that makes a report has the same options and formats, and raw numbers."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path
from typing import get_args

import click
import pytest
from click.testing import CliRunner, Result

from llamacpp_instr import cli
from llamacpp_instr.report.report import Unit
from tests.kit.in_process import titled
from tests.kit.native_kit import ROOT
from tests.kit.nursery import Nursery
from tests.kit.report_names import LOG, MEASURED, PAGE, REPORTS, in_json, listed, word

FORMS = {"csv": "", "md": "## ", "html": "<!doctype html>"}
ON_LOG = (
    "cat {}", "cat {} --expand", "check {}", "check {} --json", "to-perfetto {} -o -",
    "to-perfetto {} --gzip -o -", "to-perfetto {} --format json -o -",
    "to-perfetto {} --format json --gzip -o -", "cat {} --expand -o -", "stats {} --html -o -",
)  # fmt: skip
PRINTING = [
    *REPORTS.values(),
    *(line.format(word(LOG)) for line in ON_LOG),
    *("--help", "stats --help", "--version"),
]


def short_name(line: str) -> str:
    """Of a test, wherever the clone is."""
    return line.replace(str(ROOT), "")


def instr(line: str, *more: object) -> Result:
    return CliRunner().invoke(cli.main, [*shlex.split(line), *map(str, more)])


@pytest.mark.native
@pytest.mark.parametrize("name", REPORTS)
def test_a_form_is_chosen_by_an_option_or_by_the_suffix(name: str, tmp_path: Path) -> None:
    forms = FORMS if name == "summary" else {"csv": ""}  # one function writes those of all
    for form, beginning in forms.items():
        path = tmp_path / f"it.{form}"
        done = instr(REPORTS[name], "-o", path)
        assert (done.exit_code, done.stdout) == (0, ""), done.output
        assert path.read_text().startswith(beginning)
        if form == "csv":
            assert len({len(row) for row in csv.reader(path.read_text().splitlines())}) == 1
        if name == "summary":
            assert path.read_text() == instr(REPORTS[name], f"--{form}").stdout
    path = tmp_path / "it.json"
    path.write_text("mine")
    again = instr(REPORTS[name], "-o", path)
    assert (again.exit_code, again.stderr.count("\n")) == (2, 1)
    assert f"{path} exists; use --force" in again.stderr
    assert path.read_text() == "mine"
    assert instr(REPORTS[name], "-o", path, "--force").exit_code == 0
    assert path.read_text() == in_json(name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((REPORTS[name] + " -o it.docx", "-o it.docx: a report is .txt, .json") for name in REPORTS
          if name != "quantize"),
        (REPORTS["summary"] + " -o it.pftrace", ".pftrace is written by `instr to-perfetto`"),
        (REPORTS["schedule"] + " -o it.pftrace", ".pftrace is written by --perfetto"),
        (REPORTS["blocks"] + " -o it.PNG", ".png is written by --heat-map"),
        (f"page {word(LOG)} -o it.pftrace", "a page is FILE.html"),
        (f"to-perfetto {word(LOG)} -o it.json", "--format json"),
    ],
    ids=short_name,
)  # fmt: skip
def test_a_suffix_of_something_else_is_refused(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = instr(line)
    assert (done.exit_code, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_option_chooses_whatever_the_suffix(tmp_path: Path) -> None:
    assert instr(REPORTS["summary"], "--md", "-o", tmp_path / "it.docx").exit_code == 0


def test_no_report_is_forgotten() -> None:
    found = set()
    for name in cli.COMMANDS:
        command = cli.main.get_command(click.Context(cli.main), name)
        assert command is not None
        if any("--html" in option.opts for option in command.params):
            found.add(name)
    # its -o is a data set, and its report goes to standard output
    lines = (REPORTS | MEASURED).values()
    assert found - {"to-flashinfer"} == {line.split()[0] for line in lines}


@pytest.mark.native
@pytest.mark.parametrize("name", REPORTS | MEASURED)
def test_json_has_raw_numbers_with_units(name: str) -> None:
    reports = titled(json.loads(in_json(name)))
    assert any(report["rows"] for report in reports)
    for report in reports:
        assert set(report["units"].values()) <= set(get_args(Unit))
        for row in report["rows"]:
            assert list(row) == list(report["units"])
            for column, unit in report["units"].items():
                if unit != "text":
                    assert isinstance(row[column], int | float | None) or row[column] == "inf"
        for figure in report["figures"].values():
            assert figure["unit"] in get_args(Unit)
            assert isinstance(figure["value"], int | float | None)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with only one of everything that can occur once."""
    log = tmp_path_factory.mktemp("short") / "short.log"
    done = instr("run demo -n 1 --threads 1 --level verbose -p a --log", log)
    assert done.exit_code == 0, done.output
    return log


@pytest.mark.native
@pytest.mark.parametrize("name", REPORTS)
def test_one_of_a_kind_is_no_plural(name: str, short: Path) -> None:
    text = instr(REPORTS[name].replace(word(LOG), word(short))).stdout
    assert re.findall(r"(?<![\w.,:±-])1 (?:[a-z]+ )?[a-z]{3,}s\b(?! *\n)", text) == []


def test_json_has_the_figures_of_the_notes_as_numbers() -> None:
    reports = {
        of["title"]: of for of in titled(json.loads(instr(REPORTS["summary"], "--json").stdout))
    }
    end = json.loads(LOG.read_text().splitlines()[-1])
    recorder = reports["Recorder"]["figures"]
    assert recorder["overhead"] == {"value": end["overhead_ns"], "unit": "ns"}
    assert recorder["bytes"] == {"value": end["bytes"], "unit": "bytes"}
    speed = reports["Speed"]["figures"]
    assert (speed["graphs built"]["value"], speed["graphs reused"]["value"]) == (2, 22)
    assert reports["Memory"]["figures"]["cells used of context 0"]["value"] == 28
    for note in (note for of in reports.values() for note in of["notes"]):
        if re.search(r"(?<!thread )\d", note):
            assert any(of["figures"] for of in reports.values() if note in of["notes"]), note


@pytest.mark.native
@pytest.mark.parametrize("line", PRINTING, ids=short_name)
def test_a_reader_that_leaves_is_no_error(line: str, nursery: Nursery, tmp_path: Path) -> None:
    done = nursery.run(shlex.split(line), tmp_path, reader=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_verdict_does_not_depend_on_the_reader(nursery: Nursery, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.log"
    damaged.write_bytes(LOG.read_bytes()[:-100])
    for line in (f"check {word(damaged)}", f"check {word(damaged)} --json"):
        assert nursery.run(shlex.split(line), tmp_path, reader=False).returncode == 1


@pytest.mark.native
def test_the_names_for_scripts_are_those_of_the_page() -> None:
    """A title may be reworded; then its column or table needs its former name as `key`."""
    page = PAGE.read_text(encoding="utf-8")
    assert listed(page) == page
    assert "``" not in page.partition("## Names")[2], "each table and column has one"
