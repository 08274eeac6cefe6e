"""The page of questions is executed, and shows what its lines really give."""

from __future__ import annotations

import re

import pytest

from tests.kit.notebook import PAGE, ROOT, executed


def test_the_page_shows_what_its_lines_give(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    page = PAGE.read_text(encoding="utf-8")
    shown, got = _plain(page), _plain(executed(page))
    assert shown == got, "write the outputs anew: python -m tests.kit.notebook"


def test_five_questions_have_an_answer():
    page = PAGE.read_text(encoding="utf-8")
    questions = [part for part in page.split("\n## ")[1:] if "```python" in part]
    assert len(questions) == 5
    for question in questions:
        code = question.partition("```python\n")[2].partition("\n```")[0]
        assert len(code.splitlines()) == 1
        answer = question.partition("```text\n")[2].partition("\n```")[0]
        assert len(answer.splitlines()) > 2


def _plain(page: str) -> str:
    """Without what pandas' versions write differently: widths and the names of types."""
    return re.sub(r"[ ]+", " ", re.sub(r"(?m)^(Name: .*)?dtype: .*$", "", page))
