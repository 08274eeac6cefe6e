"""Exports the series from the commits of an editable tree.

Invariant: nothing is written before all checks have passed. The result does not depend on the old
content of the directory, except for the comments in `series`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build.source_tree import (
    PIN_FILE,
    VENDORED,
    concerns_wheel,
    overlay_files,
    read_upstream,
)
from tools.patches.edit import PARTS, made_of
from tools.patches.repository import PRISTINE, Repository


@dataclass(frozen=True)
class Exported:
    """Names of patches, `wheel/` included."""

    changed: list[str]
    """new, or with changed content"""
    removed: list[str]
    unchanged: list[str]


def export(directory: Path, patches: Path) -> Exported:
    """Write the series in `directory` to `patches`, and remove files of patches that are gone.

    Raises BuildError, before anything is written, if the tree is not made from the pinned release,
    has uncommitted changes, or has a commit that cannot be a patch of the series.
    """
    new = export_series(directory, patches)
    old = patch_files(patches)
    changed = [name for name, content in new.items() if old.get(name) != content]
    removed = sorted(old.keys() - new.keys())
    for name in changed:
        (patches / name).parent.mkdir(exist_ok=True)
        (patches / name).write_bytes(new[name])
    series = patches / "series"
    series.write_text(render_series(series.read_text("utf-8"), list(new)), encoding="utf-8")
    for name in removed:
        (patches / name).unlink()
    return Exported(changed, removed, [name for name in new if name not in changed])


def export_series(directory: Path, patches: Path) -> dict[str, bytes]:
    """The series in an editable tree, in order: name of the patch -> content. Raises BuildError."""
    exported: dict[str, bytes] = {}
    _refuse_replaced_links(directory, patches)
    for part in PARTS:
        repository = Repository(directory / part.tree)
        _refuse_unfit(repository, patches)
        found = repository.format_patches()
        exported |= {f"{part.folder}{name}": content for name, content in found.items()}
    # llama.cpp's own first; no file is changed by both kinds
    return dict(sorted(exported.items(), key=lambda item: (concerns_wheel(item[0]), item[0])))


def patch_files(patches: Path) -> dict[str, bytes]:
    """The patches in the directory `patches`, in the series or not: name -> content."""
    return {
        f"{part.folder}{path.name}": path.read_bytes()
        for part in PARTS
        for path in sorted((patches / part.folder).glob("[0-9][0-9][0-9][0-9]-*.patch"))
    }


def render_series(old: str, names: list[str]) -> str:
    """The text of `series` with these patches; each keeps the comments before it and beside it.

    The comment at the top stays there. A comment before a removed patch moves to the next one.
    """
    slugs = {_slug(name) for name in names}
    before: dict[str, list[str]] = {}
    beside: dict[str, str] = {}
    pending: list[str] = []
    top: list[str] | None = None
    for line in old.splitlines():
        name, comment = (line.split("#", 1)[0].strip(), line.partition("#")[1:])
        if not name:
            pending.append(line)
            continue
        if top is None:
            top, pending = pending, []
        if _slug(name) in slugs:
            before[_slug(name)], pending = pending, []
            beside[_slug(name)] = "".join(comment)
    if top is None:
        top, pending = pending, []
    lines = list(top)
    for name in names:
        lines += before.get(_slug(name), [])
        lines.append(f"{name}  {beside.get(_slug(name), '')}".rstrip())
    return "".join(f"{line}\n" for line in [*lines, *pending])


def _slug(name: str) -> str:
    """The part of a name that does not change with its number: `wheel/ship-the-variants.patch`."""
    return re.sub(r"(^|/)\d{4}-", r"\1", name)


def _refuse_replaced_links(directory: Path, patches: Path) -> None:
    """Raises BuildError for one of our files that was saved in the tree and not in patches/src."""
    for file in overlay_files(patches):
        there, ours = directory / VENDORED / file, patches / "src" / file
        if there.is_symlink() and there.resolve() != ours.resolve():
            raise BuildError(f"{there}: it links to {there.resolve()}; export to that checkout")
        if there.is_file() and not there.is_symlink():
            raise BuildError(f"{there}: an editor replaced the link; run: mv {there} {ours}")


def _refuse_unfit(repository: Repository, patches: Path) -> None:
    """Raises BuildError if the commits after `pristine` are not a series for the pin."""
    root = repository.root
    if not repository.has(PRISTINE):
        raise BuildError(f"{root}: no tree of `python -m tools.patches edit`")
    if repository.in_progress():
        raise BuildError(f"{root}: git am or git rebase is not finished; continue or abort it")
    changes = repository.git("status", "--porcelain").splitlines()
    if changes:
        more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
        raise BuildError(
            f"{root}: {changes[0][3:]}{more} not committed; "
            "commit changes that belong to a patch; whole files of ours go to patches/src"
        )
    version, sha256 = made_of(repository)
    pin = read_upstream(patches)
    if sha256 != pin.sha256:
        raise BuildError(
            f"{root}: it is made from llama-cpp-python {version} with sha256 {sha256}, but "
            f"{patches / PIN_FILE} pins {pin.version} with {pin.sha256}; set the pin first"
        )
    if not repository.is_ancestor(PRISTINE, "HEAD"):
        raise BuildError(f"{root}: HEAD does not come after the tag {PRISTINE}")
    for commit in repository.git("rev-list", "--reverse", f"{PRISTINE}..HEAD").split():
        subject, _, rest = repository.git("log", "-1", "--format=%s%n%P%n%b", commit).partition(
            "\n"
        )
        parents, _, body = rest.partition("\n")
        what = f"{root}: {commit[:10]} ({subject})"
        if len(parents.split()) > 1:
            raise BuildError(f"{what} is a merge; a series is a line: git rebase {PRISTINE}")
        if not body.strip():
            raise BuildError(
                f"{what} has no reason; explain below the title why the patch is needed: "
                f"git rebase -i {PRISTINE}, reword"
            )
        if not repository.git("diff-tree", "-r", "--name-only", commit, f"{commit}^"):
            raise BuildError(f"{what} changes nothing; drop it: git rebase -i {PRISTINE}")
