"""Patterns that are too long or too deeply nested for the library are refused; the longest allowed
ones overflow no stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.patterns import MAX_NESTING, MAX_PATTERN
from llamacpp_instr.recording.session import record
from tests.conftest import Instr, assert_refused
from tests.kit.native_kit import DEMO

pytestmark = pytest.mark.native

NESTED = "(" * (MAX_NESTING + 1) + ")" * (MAX_NESTING + 1)
LONG = "x" * (MAX_PATTERN + 1)
WRONG = pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(" * 20_000 + ")" * 20_000, "40,000 characters"),
        ("(" * 5_000 + ")" * 5_000, "10,000 characters"),
        (LONG, "1,001 characters"),
        (NESTED, "nests 101 parentheses"),
    ],
)


@WRONG
@pytest.mark.parametrize(
    "line",
    [
        "run demo -p x --log a.log --stats PATTERN",
        "exec --log a.log --stats PATTERN -- true",
        "quantize demo --types Q8_0 --dry-run --tensor-type PATTERN=Q6_K",
    ],
)
def test_such_a_pattern_is_refused(
    line: str, pattern: str, why: str, tmp_path: Path, instr: Instr
) -> None:
    words = [word.replace("PATTERN", pattern) for word in line.split()]
    assert_refused(instr(*words), why)
    assert list(tmp_path.iterdir()) == []


@WRONG
def test_python_is_told_too(pattern: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=why):
        record(tmp_path / "a.log", stats=pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * MAX_NESTING + "Qcur" + ")" * MAX_NESTING,
        "Q" + "(?=c)" * ((MAX_PATTERN - 1) // 5),
        "Q" + "c?" * ((MAX_PATTERN - 1) // 2),
        "Q|" * (MAX_PATTERN // 2),
        "[^x]*" * 3 + "Q" * (MAX_PATTERN - 15),
    ],
    ids=["nested", "looking ahead", "optional", "choices", "long"],
)
def test_the_longest_patterns_are_followed(pattern: str, tmp_path: Path, instr: Instr) -> None:
    done = instr("run", "demo", "-p", "x", "-n", "2", "--log", "a.log", "--stats", pattern)
    assert (done.returncode, (tmp_path / "a.log").exists()) == (0, True)


def test_the_longest_override_is_followed(instr: Instr) -> None:
    pattern = "(" * MAX_NESTING + "ffn_down" + ")" * MAX_NESTING
    done = instr(
        "quantize", str(DEMO), "--types", "Q8_0", "--dry-run", "--tensor-type", f"{pattern}=Q6_K"
    )
    assert done.returncode == 0
