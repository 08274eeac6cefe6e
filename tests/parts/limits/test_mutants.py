"""A chat template of a model file has limits of memory and time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Instr
from tests.kit.mutants import (
    number,
    text,
    texts,
    write_mutant,
)
from tests.llama.test_mutants import run

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (number(3), ""),
        (texts(["a"]), "no chat template"),
        (text(""), "no chat template"),
        (text("{% for %}"), "cannot be rendered"),
        (text("{{ a.b.c }}"), "cannot be rendered: 'a' is undefined"),
        (text("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}"), "cannot be rendered"),
        (text("{% if 1 %}" * 3000 + "{% endif %}" * 3000), "cannot be rendered"),
        (text("{{ raise_exception('no\n way') }}"), "cannot be rendered: no way"),
        (text("{{ 'a' * 10 ** 10 }}"), "cannot be rendered: MemoryError"),
        (text("{{ 'a' * 3 * 10 ** 8 }}"), "cannot be rendered: MemoryError"),
        (text("{{ 'a' * 10 ** 7 }}"), "a prompt of 14 characters into 10,000,000"),
        (text("{{ '\\ud800' }}"), "cannot be rendered: 'utf-8' codec"),
        # llama.cpp would take minutes for the tokens
        (text("{{ '<s>a' * 200000 }}"), "a prompt of 14 characters into 800,000"),
        # one C call that never ends: no exception could stop it
        (text("{{ 10 ** (10 ** 10) }}"), "did not end within"),
    ],
)
def test_a_chat_template_has_limits(
    instr: Instr, tmp_path: Path, template: bytes, words: str
) -> None:
    model = write_mutant(tmp_path / "mutant.gguf", {"chat_template": template})
    status, error = run(instr, model, "--chat")
    assert status == (2 if words else 0)
    assert words in error
