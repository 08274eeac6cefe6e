"""One spelling for each idea: ranges, and options that were called otherwise before."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.cli import COMMANDS, OLD_OPTIONS, main
from llamacpp_instr.cli.options import LAST, range_option

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


@click.command()
@range_option("--steps", "Steps.")
def ranged(steps: tuple[int, int] | None) -> None:
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
