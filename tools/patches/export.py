"""Exports the series from the commits of an editable tree, and checks the series that is there.

Invariant: nothing is written before all checks have passed. The result does not depend on the old
content of the directory, except for the comments in `series`. A check changes no files; it compares
them with a tree made from the pinned sdist.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build.source_tree import (
    PIN_FILE,
    VENDORED,
    concerns_wheel,
    overlay_files,
    read_series,
    read_upstream,
)
from tools.patches.edit import PARTS, made_of, make_editable
from tools.patches.repository import PRISTINE, Repository

# | `0002` | `a/file.c`, `b/file.c` | why | it can go when |
_ROW = re.compile(r"\| `((?:wheel/)?\d{4})` \|([^|]*)\|([^|]*)\|([^|]*)\|")


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
    for folder, tree in PARTS.items():
        repository = Repository(directory / tree)
        _refuse_unfit(repository, patches)
        found = repository.format_patches()
        exported |= {f"{folder}{name}": content for name, content in found.items()}
    # llama.cpp's own first; no file is changed by both kinds
    return dict(sorted(exported.items(), key=lambda item: (concerns_wheel(item[0]), item[0])))


def patch_files(patches: Path) -> dict[str, bytes]:
    """The patches in the directory `patches`, in the series or not: name -> content."""
    return {
        f"{folder}{path.name}": path.read_bytes()
        for folder in PARTS
        for path in sorted((patches / folder).glob("[0-9][0-9][0-9][0-9]-*.patch"))
    }


def render_series(old: str, names: list[str]) -> str:
    """The text of `series` with these patches; each keeps the comments before it and beside it.

    The comment at the top stays there. A comment before a removed patch moves to the next one.
    """
    slugs = {_slug(name) for name in names}
    before: dict[str, list[str]] = {}
    beside: dict[str, str] = {}
    top: list[str] | None = None
    pending: list[str] = []
    for line in old.splitlines():
        name, sharp, comment = line.partition("#")
        slug = _slug(name.strip())
        if not slug:
            pending.append(line)
            continue
        if top is None:
            top, pending = pending, []
        if slug in slugs:
            before[slug], beside[slug], pending = pending, sharp + comment, []
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
        raise BuildError(f"{root}: not a tree of `python -m tools.patches edit`")
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
        text = repository.git("log", "-1", "--format=%s%n%P%n%b", commit)
        subject, parents, body = text.split("\n", 2)
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


# --- the check ---


def find_faults(sdist: Path, patches: Path) -> list[str]:
    """All findings about the series in `patches`; `sdist` is the pinned release."""
    try:
        names = read_series(patches)
    except BuildError as error:
        return [str(error)]
    return [
        *(
            f"{patches / name}: no line of {patches / 'series'} names it"
            for name in patch_files(patches)
            if name not in names
        ),
        *_undocumented(patches, names),
        *_unnamed(patches, names),
        *_not_canonical(sdist, patches, names),
    ]


def _not_canonical(sdist: Path, patches: Path, names: list[str]) -> list[str]:
    """Patches that differ from their own export after they are applied."""
    with tempfile.TemporaryDirectory(prefix="check-") as work:
        try:
            exported = export_series(make_editable(sdist, Path(work), patches), patches)
        except BuildError as error:
            # without the path of the temporary tree
            return [str(error).replace(f"{Path(work)}/", "")]
    faults = [
        f"{patches / name}: not as it is exported; run: python -m tools.patches edit, then export"
        for name in names
        if exported.get(name) != (patches / name).read_bytes()
    ]
    series = patches / "series"
    text = series.read_text("utf-8")
    if not faults and text != render_series(text, list(exported)):
        faults.append(f"{series}: not in the order, or not in the form, in which it is exported")
    return faults


def _undocumented(patches: Path, names: list[str]) -> list[str]:
    """What the README's table lacks: it needs a row per patch, with its files, its reason, and when
    it can go."""
    readme = patches / "README.md"
    rows = {row[0]: row[1:] for row in _ROW.findall(readme.read_text("utf-8"))}
    faults = []
    for name in names:
        number = re.sub(r"(\d{4})-.*", r"\1", name)
        row = rows.pop(number, None)
        if row is None:
            faults.append(f"{readme}: the table has no row `{number}` for {name}")
            continue
        text = (patches / name).read_text("utf-8", "surrogateescape")
        changed = set(re.findall(r"^diff --git a/(.+) b/\1$", text, re.MULTILINE))
        named = set(re.findall(r"`([^`]+)`", row[0]))
        faults += [f"{readme}: row `{number}` lacks {file}" for file in sorted(changed - named)]
        faults += [
            f"{readme}: row `{number}` has {file}, which the patch does not change"
            for file in sorted(named - changed)
        ]
        if not row[1].strip() or not row[2].strip():
            faults.append(f"{readme}: row `{number}` does not say why, or when it can go")
    return faults + [f"{readme}: row `{number}` belongs to no patch" for number in rows]


def _unnamed(patches: Path, names: list[str]) -> list[str]:
    """Our files that nothing compiles or includes, or that the README does not list."""
    own = overlay_files(patches)
    texts = {path: (patches / "src" / path).read_text("utf-8") for path in own}
    added = "".join(
        line
        for name in names
        for line in (patches / name).read_text("utf-8", "surrogateescape").splitlines(True)
        if line.startswith("+")
    )
    readme = patches / "README.md"
    listed = _listed(readme.read_text("utf-8"))
    faults = []
    for path in own:
        others = [text for other, text in texts.items() if other != path]
        word = re.compile(rf"(?<![\w.-]){re.escape(path.name)}(?![\w.-])")
        if not any(word.search(text) for text in [added, *others]):
            faults.append(f"{patches / 'src' / path}: no patch and no other file names it")
        if path.name not in listed:
            faults.append(f"{readme}: the table of the files of src/ lacks {path.name}")
    return faults


def _listed(text: str) -> set[str]:
    """File names in backticks, with `name.{h,cpp}` expanded."""
    found = set()
    for name in re.findall(r"`([^`\n]+)`", text):
        parts = [part.split(",") for part in re.split(r"[{}]", name)]
        found |= {"".join(choice).rpartition("/")[2] for choice in product(*parts)}
    return found
