"""The pages whose code runs show what it gives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit.notebook import PAGE, ROOT, TUTORIAL, executed


@pytest.mark.parametrize("page", [PAGE, TUTORIAL], ids=lambda page: page.stem)
def test_a_page_shows_what_its_lines_give(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = page.read_text(encoding="utf-8")
    assert plain(text) == plain(executed(text)), "write it again: python -m tests.kit.notebook"


def plain(page: str) -> str:
    """Without what versions of pandas write differently: widths and the names of types."""
    page = re.sub(r"(?m)^(Name: .*)?dtype: .*$", "", page)
    return re.sub(r"[ ]+", " ", re.sub(r"(?m)^ +", "", page))
