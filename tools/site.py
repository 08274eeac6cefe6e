"""The hooks of mkdocs that make a site of the repository's own pages: `make docs`.

Links between the pages follow the layout of the repository, so that the pages can be read there.
Four of them lie outside docs/; they also become pages of the site. Links to source files become
plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
INDEX = "docs/README.md"
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "docker/README.md": "reference/container-image.md",
    "patches/README.md": "patches.md",
}
"""pages outside docs/ and their place in the site"""
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s#]+)(#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation is the index: headings are sections, and each line of a list is a page."""
    nav: list[dict[str, object]] = [{"Start": "README.md"}]
    section: list[object] = []
    group: list[object] = section
    for line in (ROOT / INDEX).read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"(##+) (.+)", line):
            group = []
            if heading[1] == "##":
                section = group
                nav.append({heading[2]: group})
            else:
                section.append({heading[2]: group})
        elif entry := re.match(r"- \[(.+?)\]\((.+?)\)", line):
            group.append({entry[1]: in_site(entry[2], INDEX)})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for path, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    place = page.file.src_uri
    path = next((path for path, to in OUTSIDE.items() if to == place), f"docs/{place}")

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        there = in_site(target, path)
        if there is None:
            return text
        return f"[{text}]({os.path.relpath(there, Path(place).parent)}{anchor})"

    return LINK.sub(link, markdown)


def in_site(target: str, path: str) -> str | None:
    """The place in the site of what a page of the repository links to; None for source files."""
    full = os.path.normpath(Path(path).parent / target)
    if full in OUTSIDE:
        return OUTSIDE[full]
    return full.removeprefix("docs/") if full.startswith("docs/") else None
