"""The examples of hypothesis are the same in every run, and others are drawn to explore."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.profiles import EXPLORE, SAME, SETTINGS, load_profiles
from tests.kit.strategies import damaged_logs, logs

TESTS = Path(__file__).parent
SOUND = [b'{"step":1}\n' * 9, b'{"ctx":2}\n' * 5]
VALUES = st.integers(), st.floats(), st.text(), st.binary(), logs(), damaged_logs(SOUND)


def print_examples(profile: str) -> None:
    """Prints what hypothesis draws from strategies as the tests have them."""
    load_profiles()
    settings.load_profile(profile)
    drawn: list[str] = []

    @settings(max_examples=15)
    @given(st.tuples(*VALUES))
    def draw(example: tuple[Any, ...]) -> None:
        drawn.append(ascii(example))

    draw()
    print(json.dumps(drawn))


def examples(folder: Path, environment: dict[str, str], seed: str, *lines: str) -> list[str]:
    """What a new process draws after it has run these lines."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=folder, capture_output=True, text=True,
        env={**environment, "PYTHONHASHSEED": seed}, timeout=300, check=True,
    )  # fmt: skip
    drawn: list[str] = json.loads(done.stdout)
    assert len(drawn) == 15
    return drawn


IMPORT = "from tests.test_examples import print_examples"


@pytest.mark.native
def test_the_same_examples_are_drawn_in_every_process(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """With other hashes, in another folder, and when other modules have been loaded."""
    draw = f"print_examples({SAME!r})"
    first = examples(tmp_path, environment, "1", IMPORT, draw)
    (tmp_path / "other").mkdir()
    lines = "import llamacpp_instr.cli", "import random; random.seed(5)", IMPORT, draw
    assert examples(tmp_path / "other", environment, "2", *lines) == first


def test_this_run_draws_the_same_examples_unless_it_explores(
    request: pytest.FixtureRequest,
) -> None:
    exploring = request.config.getoption("--hypothesis-profile") == EXPLORE
    assert settings().derandomize is not exploring
    assert (settings().deadline, settings().database) == (None, None)


def test_no_test_overrides_the_profile() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py"))]
    calls = [
        call
        for text in texts
        if "hypothesis" in text
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
    ]
    named = [(ast.unparse(call.func).rpartition(".")[2], call.keywords) for call in calls]
    arguments = [word.arg for name, words in named if name == "settings" for word in words]
    assert len(arguments) > 50
    assert set(arguments).isdisjoint(SETTINGS)
    assert {name for name, _ in named}.isdisjoint({"seed", "reproduce_failure", "example_database"})
