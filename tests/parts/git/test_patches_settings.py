"""The export of the series does not depend on git's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.patches_kit import World, git
from tools.patches.export import find_faults

pytestmark = pytest.mark.native

HOSTILE = """\
[user]
    name = Somebody Else
    email = somebody@example.com
[core]
    autocrlf = true
    abbrev = 7
    quotePath = false
    commentChar = %
[diff]
    algorithm = patience
    context = 1
    interHunkContext = 20
    noprefix = true
    mnemonicPrefix = true
    renames = copies
    indentHeuristic = false
    suppressBlankEmpty = true
    relative = true
    orderFile = order
    external = false
[format]
    pretty = oneline
    suffix = .txt
    numbered = true
    attach = true
    thread = true
    signOff = true
    signature = by hand
    coverLetter = true
    from = true
    useAutoBase = true
    notes = true
    encodeEmailHeaders = true
    subjectPrefix = RFC
    headers = X-Mine: 1
    to = a@example.com
    outputDirectory = elsewhere
    filenameMaxLength = 9
    noprefix = true
[am]
    threeWay = true
    keepcr = false
[apply]
    whitespace = fix
[i18n]
    commitEncoding = ISO-8859-1
    logOutputEncoding = ISO-8859-1
[init]
    defaultObjectFormat = sha256
    defaultBranch = trunk
[log]
    showSignature = true
    date = relative
[status]
    showUntrackedFiles = no
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a user who has set everything."""
    home = tmp_path / "home"
    (home / ".config" / "git").mkdir(parents=True)
    (home / ".gitconfig").write_text(HOSTILE)
    (home / ".config" / "git" / "attributes").write_text("*.c diff=cpp eol=crlf text\n")
    (home / ".config" / "git" / "ignore").write_text("*\n")
    order = tmp_path / "order"
    order.write_text("src/other.c\n")
    for name, value in {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "GIT_CONFIG_GLOBAL": str(home / ".gitconfig"),
        "GIT_AUTHOR_NAME": "Somebody Else",
        "GIT_AUTHOR_EMAIL": "somebody@example.com",
        "GIT_COMMITTER_NAME": "Somebody Else",
        "GIT_DIFF_OPTS": "--unified=7",
        "GIT_EXTERNAL_DIFF": "false",
        "GIT_DEFAULT_HASH": "sha256",
        "GIT_INDEX_FILE": str(tmp_path / "index"),
        "GIT_DIR": str(tmp_path / "nowhere"),
        "TZ": "Asia/Kathmandu",
        "LC_ALL": "de_DE.UTF-8",
        "LANGUAGE": "de",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("hostile")
def test_nothing_of_the_user_gets_into_the_series(world: World) -> None:
    before = world.bytes()
    assert world.export().changed == []
    assert find_faults(world.sdist, world.patches) == []
    assert world.bytes() == before


def test_nothing_that_was_set_in_the_tree_gets_into_the_series(world: World) -> None:
    before = world.bytes()
    for root in (world.llama, world.tree):
        with (root / ".git" / "config").open("a") as config:
            config.write(HOSTILE.replace("    showUntrackedFiles = no\n", ""))
        with (root / ".git" / "info" / "attributes").open("a") as attributes:
            attributes.write("* diff=cpp\n")
    world.export()
    assert world.bytes() == before


def test_a_patch_does_not_tell_who_wrote_it_or_where(world: World) -> None:
    there = {"TZ": "Asia/Kathmandu", "GIT_AUTHOR_DATE": "2026-01-02T03:04:05+0545"}
    (world.llama / "src" / "other.c").write_text("int i;\n")
    git(world.llama, "commit", "-a", "-m", "more: of it\n\nIt has to.", **there)
    world.export()
    head = (world.patches / "0003-more-of-it.patch").read_text().splitlines()[:4]
    assert head[1:] == [
        "From: llamacpp-instr <llamacpp-instr@example.org>",
        "Date: Thu, 1 Jan 2026 21:19:05 +0000",
        "Subject: [PATCH] more: of it",
    ]
