"""Patterns that are too long or too deeply nested for the library are refused; the longest allowed
ones overflow no stack."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.patterns import MAX_NESTING, MAX_PATTERN, name_matches
from llamacpp_instr.log.graph.ops import VIEW_OPS
from llamacpp_instr.recording.session import record
from tests.conftest import Instr, assert_refused, read_events
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
def test_python_raises_the_same_error(pattern: str, why: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("pattern", ["ffn_*-[!1-3]", "?cur-*", "*", "re:^(Q|K)cur-1$"])
def test_the_recorder_reads_a_glob_as_others_do(pattern: str, tmp_path: Path) -> None:
    """The names that `std::regex` finds are those that Python finds."""
    with record(tmp_path / "a.log", stats=pattern):
        model = llama_cpp.Llama(str(DEMO), n_ctx=64, verbose=False)
        model("x", max_tokens=1)
    graphs = read_events(tmp_path / "a.log", "graph")
    ran = {
        name
        for nodes in (graph["nodes"] for graph in graphs)
        for name, op, kind in zip(nodes["name"], nodes["op"], nodes["type"], strict=True)
        if op not in VIEW_OPS and kind in ("f16", "f32")
    }
    found = {read["name"] for read in read_events(tmp_path / "a.log", "tensor_stats")}
    assert found == {name for name in ran if name_matches(name, pattern)} != set()


def test_the_longest_override_is_followed(instr: Instr) -> None:
    pattern = "(" * MAX_NESTING + "ffn_down" + ")" * MAX_NESTING
    done = instr(
        "quantize", str(DEMO), "--types", "Q8_0", "--dry-run", "--tensor-type", f"{pattern}=Q6_K"
    )
    assert done.returncode == 0
