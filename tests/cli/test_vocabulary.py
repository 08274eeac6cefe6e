"""One spelling for each idea: ranges, and options that once had other names."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.patterns import name_matches, regular_expression
from llamacpp_instr.cli import COMMANDS, OLD_OPTIONS, main
from llamacpp_instr.cli.options import LAST, command, range_option

FIXTURES = Path(__file__).parent.parent / "fixtures"
LOG = FIXTURES / "demo-verbose.log"
OLD = [(command, old, new) for command, of in OLD_OPTIONS.items() for old, new in of.items()]
VALUES = {
    ("cat", "--layer"): f"cat {LOG} --expand OPTION 1",
    ("cat", "--step"): f"cat {LOG} OPTION 1:2",
    ("roofline", "--probe"): f"roofline {LOG} OPTION {FIXTURES / 'probe.json'}",
    ("stats", "--layer"): f"stats {LOG} OPTION 1-2",
    ("stats", "--op"): f"stats {LOG} OPTION MUL_MAT",
    ("validate", "--against"): "validate demo OPTION nothing",
    ("weights", "--against"): "weights demo blk.0.* OPTION demo",
}
"""a use of each: its output must be that of the new spelling"""


def instr(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def options_of(command: str) -> set[str]:
    found = main.get_command(click.Context(main), command)
    assert found is not None
    return {name for option in found.params for name in option.opts}


@pytest.mark.parametrize(("command", "old", "new"), OLD)
def test_an_old_spelling_does_what_the_new_one_does(command: str, old: str, new: str) -> None:
    words = VALUES[command, old].split()
    results = [
        instr(*(option if word == "OPTION" else word for word in words)) for option in (old, new)
    ]
    assert results[0].stdout == results[1].stdout
    assert results[0].stderr == results[1].stderr
    assert results[0].exit_code == results[1].exit_code
    assert results[0].stdout or results[0].stderr
    at = words.index("OPTION")
    joined = [*words[:at], f"{old}={words[at + 1]}", *words[at + 2 :]]
    assert instr(*joined).stdout == results[0].stdout


@pytest.mark.parametrize(("command", "old", "new"), OLD)
def test_help_has_the_new_spelling_alone(command: str, old: str, new: str) -> None:
    assert new in options_of(command)
    assert old not in options_of(command)


def test_an_idea_has_one_name_in_all_commands() -> None:
    every = {option for command in COMMANDS for option in options_of(command)}
    assert every.isdisjoint({"--layer", "--op", "--probe", "--against", "--stop-after"})


STEPS = range_option("Steps.")


@command()
def ranged(steps: tuple[int, int] | None = STEPS) -> None:
    click.echo(repr(steps))


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("7", (7, 7)), ("7-9", (7, 9)), ("7:9", (7, 9)), ("7-", (7, LAST)), ("-9", (0, 9)),
        (":9", (0, 9)), ("0-0", (0, 0)), (":", (0, LAST)),
    ],
)  # fmt: skip
def test_a_range_has_both_ends(text: str, chosen: tuple[int, int]) -> None:
    assert CliRunner().invoke(ranged, ["--steps", text]).output == f"{chosen!r}\n"


def test_without_the_option_nothing_is_chosen() -> None:
    assert CliRunner().invoke(ranged, []).output == "None\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "--steps x: give 7, 7-9, 7- or -9"),
        ("", "--steps : give 7, 7-9, 7- or -9"),
        ("1-2-3", "--steps 1-2-3: give 7, 7-9, 7- or -9"),
        ("1.5", "--steps 1.5: give 7, 7-9, 7- or -9"),
        ("9" * 19, f"--steps {'9' * 19}: give 7, 7-9, 7- or -9"),
        ("9-7", "--steps 9-7: the first is greater than the last"),
    ],
)
def test_a_wrong_range_is_named(text: str, message: str) -> None:
    error = CliRunner().invoke(ranged, ["--steps", text]).exception
    assert isinstance(error, UsageError)
    assert str(error) == message


def test_layers_none_is_what_lies_outside_of_layers() -> None:
    """`cat --layer -1` once chose the same."""
    named = [
        instr("cat", str(LOG), "--expand", "--event", "op", option, value).stdout
        for option, value in (("--layers", "none"), ("--layer", "-1"))
    ]
    assert named[0] == named[1]
    assert {json.loads(line)["layer"] for line in named[0].splitlines()} == {-1}
    rows = json.loads(
        instr("stats", str(LOG), "--by", "layer", "--layers", "none", "--json").stdout
    )
    assert [row["layer"] for row in rows[0]["rows"]] == [-1]


CHARACTERS = "ab-.*?[]!^\\(|$1/"


@given(st.text(alphabet=CHARACTERS, max_size=8), st.text(alphabet=CHARACTERS, max_size=8))
def test_a_pattern_is_a_glob(name: str, pattern: str) -> None:
    """It matches as in Python's fnmatch, except that a range such as [b-a] is an error."""
    with suppress(UsageError):
        assert name_matches(name, pattern) == fnmatchcase(name, pattern)
        return
    with pytest.raises(UsageError, match="bad character range"):
        name_matches(name, pattern)


def test_after_re_it_is_a_regular_expression_that_may_match_a_part() -> None:
    assert name_matches("blk.12.ffn_down.weight", "re:ffn_(up|down)")
    assert not name_matches("blk.12.ffn_gate.weight", "re:ffn_(up|down)")
    assert not name_matches("blk.12.ffn_down.weight", "ffn_down")
    with pytest.raises(UsageError, match=r"re:\(.*is not a regular expression"):
        name_matches("x", "re:(")


@pytest.mark.parametrize(
    ("pattern", "meaning"),
    [
        ("blk.1.*", r"^blk\.1\..*$"),
        ("l_out-[0-3]", r"^l_out-[0-3]$"),
        ("re:^l_out", "^l_out"),
        # as they were before patterns were globs
        ("ffn_down", "ffn_down"),
        (r"blk\.[0-2]\.", r"blk\.[0-2]\."),
        ("^(Qcur|l_out)-0$", "^(Qcur|l_out)-0$"),
        (".*", ".*"),
    ],
)
def test_the_recorder_and_the_quantizer_get_a_regular_expression(
    pattern: str, meaning: str
) -> None:
    assert regular_expression("--stats", pattern) == meaning
    assert re.compile(meaning)
