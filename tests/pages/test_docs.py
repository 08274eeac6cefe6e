"""Every command of README and docs is one that exists, and does what the page says it does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.kit.commands_kit import PAGES
from tests.kit.native_kit import ROOT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for test in re.findall(r"`(?:python -m )?pytest ([^`]+)`", text):
        for path in re.findall(r"tests/\S+", test):
            assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ((?:tools|benchmarks|tests)[\w.]*)", text):
        path = ROOT / module.replace(".", os.sep)
        assert path.is_dir() or path.with_suffix(".py").is_file(), module
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", text, re.M):
        assert re.search(rf"^{target[0] or target[1]}:", makefile, re.M), target
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(
        r"`((?:tests|tools|benchmarks|llamacpp_instr|converters)/[^`*]+)`", text
    ):
        if path.endswith((".cpp", ".h", "CMakeLists.txt")):
            continue  # llama.cpp's
        at = ROOT / path
        assert at.exists() or at.with_suffix(".py").is_file(), path


def test_the_index_has_every_page() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} - {"README.md"}
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\): ", index, re.M)
    assert len(listed) == len(set(listed))
    assert pages == {link for link in listed if not link.startswith("..")}


def test_a_page_has_the_title_that_the_index_names() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    for title, link in re.findall(r"^- \[([^]]+)\]\(([^)]+)\): ", index, re.M):
        assert (docs / link).read_text(encoding="utf-8").startswith(f"# {title}\n"), link


def test_a_page_is_listed_in_the_group_of_its_folder() -> None:
    """A question of the first table leads to its page at once, so to all within two clicks."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    first, *groups = index.split("\n## ")
    assert len(re.findall(r"^\| .+\? \| \[", first, re.M)) == 10
    folders = {"Tutorials": "tutorials", "How-to guides": "how-to"}
    assert len(groups) == 4
    for group in groups:
        title = group.partition("\n")[0]
        folder = folders.get(title, title.lower())
        links = re.findall(r"^- \[[^]]+\]\(([^)]+)\)", group, re.M)
        assert links, title
        assert all(re.match(rf"({folder}|\.\.)/", link) for link in links), title
