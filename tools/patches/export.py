"""Writes the series back from the commits of an editable tree.

Invariant: nothing is written before everything that can be refused has been looked at, and what is
written does not depend on what the directory of the patches held, but for the comments of `series`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from llamacpp_instr.build.source_tree import VENDORED
from llamacpp_instr.build.upstream import PIN_FILE, concerns_wheel, overlay_files, read_upstream
from llamacpp_instr.errors import BuildError
from tools.patches.edit import PARTS, made_of
from tools.patches.repository import PRISTINE, Repository


@dataclass(frozen=True)
class Exported:
    """Names of patches, `wheel/` included."""

    changed: list[str]
    """new or with another content"""
    removed: list[str]
    unchanged: list[str]


def export(directory: Path, patches: Path) -> Exported:
    """Write the series in `directory` to `patches`; files of patches that are gone are removed.

    Raises BuildError, before anything is written, when the tree is not made of the pinned release,
    has changes that are not committed, or has a commit that cannot be a patch of the series.
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
    # llama.cpp's own first; the two kinds never meet in a file
    return dict(sorted(exported.items(), key=lambda item: (concerns_wheel(item[0]), item[0])))


def patch_files(patches: Path) -> dict[str, bytes]:
    """The patches that lie in `patches`, in the series or not: name -> content."""
    return {
        f"{part.folder}{path.name}": path.read_bytes()
        for part in PARTS
        for path in sorted((patches / part.folder).glob("[0-9][0-9][0-9][0-9]-*.patch"))
    }


def render_series(old: str, names: list[str]) -> str:
    """The text of `series` with these patches: each keeps the comments before it and beside it.

    The comment at the top stays there; one before a patch that is gone moves on to the next.
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
    """What stays of a name when patches before it come or go: `wheel/ship-the-variants.patch`."""
    return re.sub(r"(^|/)\d{4}-", r"\1", name)


def _refuse_replaced_links(directory: Path, patches: Path) -> None:
    """Raises BuildError for a file of ours that was saved in the tree and not in patches/src."""
    for file in overlay_files(patches):
        there, ours = directory / VENDORED / file, patches / "src" / file
        if there.is_symlink() and there.resolve() != ours.resolve():
            raise BuildError(f"{there}: it links to {there.resolve()}; export to that checkout")
        if there.is_file() and not there.is_symlink():
            raise BuildError(f"{there}: an editor replaced the link; run: mv {there} {ours}")


def _refuse_unfit(repository: Repository, patches: Path) -> None:
    """Raises BuildError when the commits after `pristine` are not a series for the pin."""
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
            "commit what belongs to a patch, whole files of ours go to patches/src"
        )
    version, sha256 = made_of(repository)
    pin = read_upstream(patches)
    if sha256 != pin.sha256:
        raise BuildError(
            f"{root}: it is made of llama-cpp-python {version} with sha256 {sha256}, but "
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
                f"{what} gives no reason; say below the title why the patch is there: "
                f"git rebase -i {PRISTINE}, reword"
            )
        if not repository.git("diff-tree", "-r", "--name-only", commit, f"{commit}^"):
            raise BuildError(f"{what} changes nothing; drop it: git rebase -i {PRISTINE}")
