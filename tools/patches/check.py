"""Checks the patch series and its documentation; prints one line for each finding.

Invariant: it changes no files; it compares them with a tree made from the pinned sdist.
"""

from __future__ import annotations

import re
import tempfile
from itertools import product
from pathlib import Path

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build.source_tree import overlay_files, read_series
from tools.patches.edit import make_editable
from tools.patches.export import export_series, patch_files, render_series

# | `0002` | `a/file.c`, `b/file.c` | why | it can go when |
_ROW = re.compile(r"\| `((?:wheel/)?\d{4})` \|([^|]*)\|([^|]*)\|([^|]*)\|")


def find_faults(sdist: Path, patches: Path) -> list[str]:
    """All findings about the series in `patches`; `sdist` is the pinned release."""
    try:
        names = read_series(patches)
    except BuildError as error:
        return [str(error)]
    return [
        *_stray(patches, names),
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


def _stray(patches: Path, names: list[str]) -> list[str]:
    return [
        f"{patches / name}: no line of {patches / 'series'} names it"
        for name in patch_files(patches)
        if name not in names
    ]


def _undocumented(patches: Path, names: list[str]) -> list[str]:
    """What the README's table lacks: it needs a row per patch, with its files, its reason, and
    until when it is needed."""
    readme = patches / "README.md"
    rows = {row[0]: row[1:] for row in _ROW.findall(readme.read_text("utf-8"))}
    faults = []
    for name in names:
        number = re.sub(r"(\d{4})-.*", r"\1", name)
        row = rows.pop(number, None)
        if row is None:
            faults.append(f"{readme}: the table has no row `{number}` for {name}")
            continue
        told, changed = set(re.findall(r"`([^`]+)`", row[0])), files_of(patches / name)
        faults += [f"{readme}: row `{number}` lacks {file}" for file in sorted(changed - told)]
        faults += [
            f"{readme}: row `{number}` has {file}, which the patch does not change"
            for file in sorted(told - changed)
        ]
        if not row[1].strip() or not row[2].strip():
            faults.append(f"{readme}: row `{number}` does not say why, or when it can go")
    return faults + [f"{readme}: row `{number}` is of no patch" for number in rows]


def files_of(patch: Path) -> set[str]:
    """The files that a patch changes."""
    text = patch.read_text("utf-8", "surrogateescape")
    return set(re.findall(r"^diff --git a/(.+) b/\1$", text, re.MULTILINE))


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
