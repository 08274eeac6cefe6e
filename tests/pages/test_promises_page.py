"""The counts in docs/promises.md, and those of the README, are those of the tests that it names."""

from __future__ import annotations

import re

import pytest

from tests.cli import test_converter_faults
from tests.exports import test_perfetto_sql, test_view
from tests.image import engine_lines
from tests.kit.native_kit import ROOT, random_models
from tests.memory import test_memory_plan
from tests.recording import test_accounting, test_faults, test_identity

PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def row(test: str) -> str:
    """The figures beside a test."""
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and test in line]
    assert rows, test
    return " ".join(line.split("|")[3] for line in rows)


def cases(test: object) -> int:
    """How many values a test is given."""
    return sum(len(mark.args[1]) for mark in test.pytestmark)  # type: ignore[attr-defined]


def test_runs_and_kills() -> None:
    n_models, n_levels = len(test_identity.MODELS), len(test_identity.LEVELS)
    assert f"{n_models} models" in row("test_identity")
    assert f"{n_models * 2 * n_levels} runs" in row("test_identity")
    assert f"{test_faults.KILLS} processes killed" in row("test_faults")
    assert f"{test_accounting.DECODES} decodes" in row("test_accounting")
    commands, kills = len(test_converter_faults.COMMANDS), test_converter_faults.KILLS
    assert f"{commands} commands, {kills} kills each: {commands * kills} kills" in row("converter_")
    recorded = [name for name, _ in test_perfetto_sql.RECORDED if name != "device"]
    assert f"{len(recorded)} recorded sessions" in row("test_perfetto_sql")
    assert f"{len(recorded)} sessions" in README
    assert f"{test_faults.KILLS} of {test_faults.KILLS} killed" in README


def test_architectures() -> None:
    n = len(list(random_models().glob("*.gguf")))
    assert f"{n} architectures" in row("test_every_architecture")
    assert f"{n} architectures" in row("test_claims")
    assert f"{n} of {n} architectures" in README


def test_docker_lines() -> None:
    run = [line for line in engine_lines.docker_lines() if engine_lines.reason(line) is None]
    left = len(engine_lines.docker_lines()) - len(run)
    assert f"{len(run)} lines; the {left} for GPUs" in row("make docker-test")


def test_inputs() -> None:
    headers = (ROOT / "tests" / "model" / "test_hostile_header.py").read_text(encoding="utf-8")
    changed, made = re.findall(r"max_examples=(\d+)", headers)[:2]
    assert f"{changed} changed and {made} made" in row("test_hostile_header")
    paths = cases(test_view.test_no_path_leads_out_of_the_table)
    hosts = cases(test_view.test_a_page_whose_name_was_rebound_to_us_gets_nothing)
    assert f"{paths} paths out of its folder and {hosts} foreign hosts" in row("test_view")


def test_memory() -> None:
    types = len(test_memory_plan.QUANTIZED_FILE_TYPES)
    grid = len(test_memory_plan.GRID[::2]) + len(test_memory_plan.GRID[::5])
    figures = row("test_memory_plan")
    assert f"{types} file types in 3 settings, {grid} settings of a context" in figures
    assert f"{len(test_memory_plan.ARCHITECTURES)} architectures in 4" in figures


@pytest.mark.parametrize("line", [x for x in PAGE.splitlines() if re.match(r"\| (?!promise)", x)])
def test_every_promise_has_a_test_or_a_command(line: str) -> None:
    _, promise, shown_by, _figure, _ = line.split("|")
    assert promise.strip()
    assert re.search(r"`(pytest|make|python -m) [^`]+`", shown_by)
