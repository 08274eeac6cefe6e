"""`python -m tools.mutate`: which mutants it draws, and which it calls killed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tools import mutate

SOURCE = '''"""One + two."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT: int = 3


def tested(a: int = 1, b: int | None = None) -> int | None:
    """More - or less."""
    return a + LIMIT


def untested(a: int) -> bool:
    return a > 5


@dataclass(frozen=True)
class Unchanged:
    """Less."""
    pairs: object = zip((), (), strict=True)
'''
TEST = """
from llamacpp_instr.log.graph.sums import tested

def test_it():
    assert (tested(), tested(5)) == (4, 8)
"""


def test_only_what_runs_is_changed() -> None:
    lines = {line for line, _ in mutate.places(SOURCE)}
    assert lines == {7, 10, 12, 16}
    assert {column for line, column in mutate.places(SOURCE) if line == 7} == {13}
    # the default of `a`; neither the annotations nor the default None are numbers
    assert {column for line, column in mutate.places(SOURCE) if line == 10} == {20}


def test_the_same_seed_draws_the_same_mutants_and_modules_take_turns() -> None:
    modules = ["llamacpp_instr/log/graph/ops.py", "llamacpp_instr/base/patterns.py"]
    drawn = list(mutate.draw(modules, 6, seed=5))
    assert drawn == list(mutate.draw(modules, 6, seed=5))
    assert drawn != list(mutate.draw(modules, 6, seed=6))
    assert [each.module for each in drawn[:2]] != [each.module for each in drawn[1:3]]
    assert {each.module for each in drawn} == set(modules)
    for each in drawn:
        before = (mutate.ROOT / each.module).read_text().splitlines()
        after = each.source.splitlines()
        changed = [n for n, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b]
        assert changed == [each.line]


def test_the_tests_of_the_nearest_folder_run_first_or_alone() -> None:
    pure = ["-m", "not native"]
    near, others = [*pure, "tests/graph"], [*pure, "tests", "--ignore=tests/graph"]
    rounds_of = partial(mutate.rounds_of_tests, "llamacpp_instr/log/graph/ops.py")
    assert rounds_of(near=False, native=False) == [near, others]
    assert rounds_of(near=True, native=False) == [near]
    assert rounds_of(near=True, native=True) == [near, ["-m", "native", "tests/graph"]]


def test_what_kept_the_tests_from_ending_is_not_called_killed() -> None:
    outcomes = {"a.py": "killed killed killed slow", "b.py": "killed lived lived lived"}
    results = [
        mutate.Mutant(module, 1, "", "", outcome)
        for module, of in outcomes.items()
        for outcome in of.split()
    ]
    lines = mutate.table(results).splitlines()
    assert [re.sub(" +", " ", line.strip()) for line in lines] == [
        "1 of 4 25 % b.py", "3 of 4 75 % a.py, 1 slow", "4 of 8 50 % all, 1 slow",
    ]  # fmt: skip


@pytest.mark.native
def test_a_mutant_lives_where_no_test_looks(tmp_path: Path) -> None:
    for name, text in {
        "llamacpp_instr/__init__.py": "",
        "llamacpp_instr/log/graph/__init__.py": "",
        "llamacpp_instr/log/graph/sums.py": SOURCE,
        "tests/graph/test_sums.py": TEST,
        "tests/log/test_nothing.py": "def test_nothing(): pass\n",
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['native']\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "tools").mkdir()
    shutil.copy(mutate.__file__, tmp_path / "tools")
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, "tools/mutate.py", "llamacpp_instr", "--count", "100", "--jobs", "1",
         "--at-least", "90", "-o", "found.json"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())
    outcomes = {each["line"]: each["outcome"] for each in found}
    assert outcomes == {7: "killed", 10: "killed", 12: "killed", 16: "lived"}
    n = len(found)
    killed = sum(each["outcome"] == "killed" for each in found)
    assert 0 < killed < n
    assert re.search(rf"\n *{killed} of +{n} .* all\n$", done.stdout)
    assert "\n-    return a > 5\n" in done.stdout
    assert done.returncode == 1, done.stderr
    assert (tmp_path / "llamacpp_instr/log/graph/sums.py").read_text() == SOURCE
