"""docs/how-to/how-many-users.md has what `instr capacity` prints."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.kit.in_process import printed
from tests.kit.native_kit import ROOT

PAGE = (ROOT / "docs" / "how-to" / "how-many-users.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```sh\n(instr capacity [^\n]*)\n```\n\n```text\n(.*?)\n```", PAGE, re.S)


@pytest.mark.parametrize(("line", "text"), SHOWN)
def test_the_page_has_what_the_command_prints(
    line: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / "docs" / "tutorials")
    monkeypatch.setenv("COLUMNS", "160")
    words = shlex.split(line)[1:]
    assert printed(*words).startswith(text.removesuffix("…"))


def test_the_page_has_two_commands_with_their_output() -> None:
    assert len(SHOWN) == 2
