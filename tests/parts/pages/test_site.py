"""The site of `make docs`: all pages, every link, and nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.native_kit import ROOT

LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=\"?([^\"\s>]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return directory


def test_it_has_every_page(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix("") for page in ROOT.glob("docs/*/*.md")}
    made = {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}
    assert pages < made
    assert {Path(name) for name in ("index", "contributing", "patches", "changelog")} < made


def test_a_page_loads_only_files_of_the_site(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 40
    for page in pages:
        for name in LOADED.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / name.partition("#")[0]).exists(), f"{page.name}: {name}"


def test_a_link_to_source_code_is_plain_text(site: Path) -> None:
    text = (site / "reference" / "findings.html").read_text(encoding="utf-8")
    assert "findings.py" in text
    assert "findings.py)" in text
    assert '.py"' not in text


def test_links_are_those_of_the_repository() -> None:
    from tools.site import in_site

    assert in_site("../reference/json.md", "docs/how-to/share-a-page.md") == "reference/json.md"
    assert in_site("../../docker/README.md", "docs/how-to/x.md") == "reference/container-image.md"
    assert in_site("../../converters/notebook.py", "docs/how-to/x.md") is None
