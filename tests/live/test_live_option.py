"""--live of `instr run` and `instr exec`: the page is served while the program runs."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from llamacpp_instr.log.check import check_log
from tests.conftest import Instr, assert_refused
from tests.kit.native_kit import DEMO, ROOT

pytestmark = pytest.mark.native

# generates until its page has been fetched
APPLICATION = """
import pathlib, sys, time
import llama_cpp

model = llama_cpp.Llama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False)
fetched = pathlib.Path("fetched")
while not fetched.exists():
    model("Once upon a time", max_tokens=8)
    time.sleep(0.05)
print("the application's own output")
sys.exit(7)
"""

BROWSER = """#!/bin/sh
exec "{python}" -c '
import pathlib, sys, urllib.request
page = urllib.request.urlopen(sys.argv[1], timeout=100).read()
pathlib.Path("fetched.part").write_text(sys.argv[1] + "\\n" + page.decode())
pathlib.Path("fetched.part").rename("fetched")
' "$1"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    browser = tmp_path / "browser"
    browser.write_text(BROWSER.format(python=sys.executable))
    browser.chmod(0o700)
    return {**os.environ, "BROWSER": str(browser), "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("log", ["it.log", "it-%p.log"])
def test_a_program_is_shown_while_it_runs(log: str, tmp_path: Path, started_instr: Instr) -> None:
    (tmp_path / "app.py").write_text(APPLICATION)
    command = [sys.executable, "app.py", str(DEMO)]
    done = started_instr("exec", "--live", "--log", log, "--", *command)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "the application's own output\n"
    address, page = (tmp_path / "fetched").read_text().split("\n", 1)
    assert address in done.stderr.splitlines()
    assert "<title>instr live</title>" in page
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=10)
    (written,) = tmp_path.glob("it*.log")
    assert f"log: {written}" in done.stderr
    assert list(check_log(written)) == []


def test_a_run_is_as_without_it(tmp_path: Path, started_instr: Instr) -> None:
    """It may end before the page has loaded, which is not an error."""
    words = ("run", "demo", "-p", "Once upon a time", "-n", "4", "--threads", "1")
    plain = started_instr(*words)
    shown = started_instr(*words, "--live")
    assert (shown.returncode, shown.stdout) == (0, plain.stdout)
    assert "Error" not in shown.stderr
    assert list(check_log(tmp_path / "session-2.log")) == []


def test_a_log_that_is_no_file_has_no_page(started_instr: Instr) -> None:
    refused = started_instr("run", "demo", "-p", "x", "--live", "--log", "-")
    assert_refused(refused, "--live needs a log that is a file")
