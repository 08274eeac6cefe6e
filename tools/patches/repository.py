"""Git repositories of the patched tree, independent of all settings of the user.

Invariant: git runs without the user's and the system's configuration and without its environment
variables. Patches are written from an empty repository that only borrows the objects, so that
settings in the tree itself have no effect either.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build.source_tree import misfit

PRISTINE = "pristine"
"""tag of the commit that the patches come after"""

AUTHOR = ("llamacpp-instr", "llamacpp-instr@example.org")
"""name and address of new commits in the tree, so that a patch never contains the user's"""

# Files are bytes, and a hunk's heading is found in the same way in every language.
_ATTRIBUTES = "* -text -ident -filter -working-tree-encoding !diff !merge !whitespace\n"

# Overrides settings that would affect commits, or patches that are applied by hand. Objects are not
# compressed, because thousands of files are read once and then deleted.
_SETTINGS = f"""\
[user]
    name = {AUTHOR[0]}
    email = {AUTHOR[1]}
[core]
    autocrlf = false
    hooksPath = {os.devnull}
    looseCompression = 0
[commit]
    gpgSign = false
    template =
[apply]
    whitespace = nowarn
[merge]
    conflictStyle = diff3
[gc]
    auto = 0
"""

# Options for everything that settings or versions of git decide differently.
_FORMAT = [
    "--zero-commit", "--no-signature", "--full-index", "--no-stat", "--no-numbered",
    "--no-attach", "--no-thread", "--no-cover-letter", "--no-base", "--no-signoff", "--no-from",
    "--no-to", "--no-cc", "--no-add-header", "--no-notes", "--no-encode-email-headers",
    "--subject-prefix=PATCH", "--suffix=.patch", "--start-number=1", "--encoding=UTF-8",
    "--diff-algorithm=myers", "--indent-heuristic", "--unified=3", "--inter-hunk-context=0",
    "--no-renames", "--src-prefix=a/", "--dst-prefix=b/", "--no-relative", "--no-color",
    "--no-ext-diff", "--no-textconv",
]  # fmt: skip

_APPLY = [
    "--quiet", "--keep-cr", "--keep-non-patch", "--no-scissors", "--no-gpg-sign",
    "--whitespace=nowarn", "--committer-date-is-author-date",
]  # fmt: skip


@dataclass(frozen=True)
class Stopped:
    """A patch that does not apply."""

    patch: Path
    files: list[str]
    """files in conflict, which must be edited; empty if git could not begin to merge"""
    reason: str
    """such as `src/llama.c:12 differs`"""


@dataclass(frozen=True)
class Repository:
    """The repository whose work tree is `root`."""

    root: Path

    def git(self, *arguments: str) -> str:
        """The output of a git command. Raises BuildError with git's first error line if it
        fails."""
        done = self._run(arguments)
        if done.returncode != 0:
            raise BuildError(f"git {arguments[0]} in {self.root}: {_complaint(done.stderr)}")
        return done.stdout

    def has(self, revision: str) -> bool:
        """Whether `root` is the top of a work tree that has this revision."""
        name = f"{revision}^{{commit}}"
        return (self.root / ".git").exists() and (
            self._run(["rev-parse", "--verify", "--quiet", name]).returncode == 0
        )

    def is_ancestor(self, old: str, new: str) -> bool:
        """Whether the commit `new` comes after `old`."""
        return self._run(["merge-base", "--is-ancestor", old, new]).returncode == 0

    def in_progress(self) -> bool:
        """Whether a `git am` or `git rebase` is unfinished."""
        names = ("rebase-apply", "rebase-merge")
        return any((self.root / ".git" / name).exists() for name in names)

    def create(self, exclude: Sequence[str]) -> None:
        """Create it, empty; files that match `exclude` never count as changes."""
        self.git("init", "--quiet", "--template=", "--object-format=sha1", "-b", "series")
        info = self.root / ".git" / "info"
        info.mkdir()
        (info / "attributes").write_text(_ATTRIBUTES)
        (info / "exclude").write_text("".join(f"{line}\n" for line in exclude))
        with (self.root / ".git" / "config").open("a") as config:
            config.write(_SETTINGS)

    def commit_tree(self, message: str, without: str | None = None) -> None:
        """Commit every file of the work tree, ignored or not, except the directory `without`."""
        kept = [f":(exclude){without}"] if without else []
        self.git("add", "--all", "--force", "--", ".", *kept)
        self.git("commit", "--quiet", "--allow-empty", "-m", message)

    def apply(self, patches: Sequence[Path], *, three_way: bool = False) -> Stopped | None:
        """Make one commit for each patch; with `three_way`, a patch that does not fit is merged.

        Returns the patch at which `git am` stopped, to be continued, or None if all were applied.
        """
        if not patches:
            return None
        done = self._run(["am", *_APPLY, *(["--3way"] * three_way), "--", *map(str, patches)])
        if done.returncode == 0:
            return None
        try:
            number = int((self.root / ".git" / "rebase-apply" / "next").read_text())
        except (OSError, ValueError):
            raise BuildError(f"git am in {self.root}: {_complaint(done.stderr)}") from None
        files = self.git("diff", "--name-only", "--diff-filter=U").splitlines()
        return Stopped(patches[number - 1], files, misfit(done.stderr))

    def format_patches(self) -> dict[str, bytes]:
        """The commits after `pristine` as patches, in order: file name -> content."""
        commits = f"{self._hash(PRISTINE)}..{self._hash('HEAD')}"
        objects = self.root / self.git("rev-parse", "--git-path", "objects").strip()
        with tempfile.TemporaryDirectory(prefix="patches-") as name:
            neutral = Repository(Path(name))
            neutral.git("init", "--quiet", "--template=", "--object-format=sha1", "--bare")
            borrowed = {"GIT_OBJECT_DIRECTORY": str(objects.resolve())}
            done = neutral._run(["format-patch", *_FORMAT, "-o", "out", commits], borrowed)
            if done.returncode != 0:
                raise BuildError(f"git format-patch in {self.root}: {_complaint(done.stderr)}")
            paths = sorted((neutral.root / "out").glob("*.patch"))
            return {path.name: _date_in_utc(path.read_bytes()) for path in paths}

    def _hash(self, revision: str) -> str:
        return self.git("rev-parse", "--verify", f"{revision}^{{commit}}").strip()

    def _run(
        self, arguments: Sequence[str], variables: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        name, address = AUTHOR
        env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        env |= {
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_CEILING_DIRECTORIES": str(self.root.resolve().parent),
            # git looks there for attributes and ignored files, whatever the configuration says
            "HOME": os.devnull,
            "XDG_CONFIG_HOME": os.devnull,
            **{"GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": address},
            **{"GIT_COMMITTER_NAME": name, "GIT_COMMITTER_EMAIL": address},
            # the same commits from the same patches
            "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
            "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
            "LC_ALL": "C",
            "TZ": "UTC",
        }
        try:
            return subprocess.run(
                ["git", *arguments], cwd=self.root, env=env | (variables or {}),
                stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
                errors="surrogateescape",
            )  # fmt: skip
        except FileNotFoundError:
            raise BuildError("git is not installed (Debian, Ubuntu: apt install git)") from None


def _date_in_utc(patch: bytes) -> bytes:
    """A patch with its `Date:` in UTC, so that it does not reveal a time zone."""
    head, blank, body = patch.partition(b"\n\n")
    found = re.search(rb"^Date: (.+)$", head, re.MULTILINE)
    if found is None:
        return patch
    date = parsedate_to_datetime(found[1].decode("ascii"))
    utc = (date - (date.utcoffset() or date - date)).replace(tzinfo=None)
    text = f"{utc:%a}, {utc.day} {utc:%b %Y %H:%M:%S} +0000"
    return head[: found.start(1)] + text.encode("ascii") + head[found.end(1) :] + blank + body


def _complaint(output: str) -> str:
    """The most informative line of git's error output."""
    lines = [line for line in output.splitlines() if line.startswith(("fatal: ", "error: "))]
    return (lines or output.strip().splitlines() or ["it failed without a message"])[0]
