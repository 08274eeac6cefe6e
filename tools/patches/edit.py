"""Makes the tree in which patches are edited: an sdist with two nested git repositories, in which
every patch is a commit after the tag `pristine`.

Invariant: the tree is made under another name and renamed when it is complete, so a failure leaves
nothing behind. Our own files in it are links to `patches/src`, so edits in the tree change those.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build.log import BuildLog
from llamacpp_instr.llama.build.source_tree import (
    BUILD_HEADER,
    VENDORED,
    Upstream,
    concerns_wheel,
    download_sdist,
    overlay_files,
    patch_digest,
    read_series,
    read_upstream,
    sha256_of,
    unpack_pinned,
    unpack_sdist,
    write_build_header,
)
from tools.patches.repository import PRISTINE, Repository, Stopped

BRANCH = "llamacpp-instr"
"""of a checkout that gets the patches"""
OLD, OLD_PATCHED = "old-pristine", "old-patched"
"""tags of the pinned release, if the series is carried to another one"""


# the outer one first: changes in the inner one are not changes of the outer one
PARTS = {"wheel/": Path(), "": VENDORED}
"""folders of patches, and the tree below the sdist's root that those of each apply to"""


def _patches_of(folder: str, patches: Path) -> list[Path]:
    """The patches of a folder, in order."""
    names = read_series(patches)
    return [patches / name for name in names if concerns_wheel(name) is bool(folder)]


def make_editable(sdist: Path, into: Path, patches: Path) -> Path:
    """Unpack the pinned sdist into the empty directory `into`, with one commit per patch; returns
    the root.

    Raises BuildError, which names the patch, if one does not apply.
    """
    root = unpack_pinned(sdist, into, patches)
    # git does not follow our links, but they are not changes of llama.cpp either
    ours = [*overlay_files(patches), BUILD_HEADER.relative_to(VENDORED)]
    for folder, tree in PARTS.items():
        own = ours if tree == VENDORED else [VENDORED]
        repository = Repository(root / tree)
        repository.create([*(f"/{path.as_posix()}" for path in own), "/build*/"])
        _commit_release(repository, tree, sdist, read_upstream(patches).version)
        if stopped := repository.apply(_patches_of(folder, patches)):
            raise BuildError(
                f"{stopped.patch} does not apply to the pinned sdist: {stopped.reason}"
            )
    return root


def edit(sdist: Path, directory: Path, patches: Path) -> None:
    """Make `directory` the editable tree of the pinned sdist.

    Raises BuildError if it exists and is not empty, or if a patch does not apply.
    """
    refuse_existing(directory)
    with tempfile.TemporaryDirectory(prefix="edit-", dir=directory.parent) as name:
        root = make_editable(sdist, Path(name), patches)
        _add_own_files(root, patches, read_upstream(patches))
        _move(root, directory)


def carry(
    sdist: Path, release: Path, version: str, directory: Path, patches: Path
) -> tuple[Upstream, list[Stopped]]:
    """Make `directory` the editable tree of another release, with the series carried over to it.

    The history contains both trees, so that patches that do not apply are merged. Returns the pin
    of the release, and for each tree in which `git am` stopped, the patch. Raises the errors of
    `edit`; the series must apply to the pinned sdist.
    """
    refuse_existing(directory)
    with tempfile.TemporaryDirectory(prefix="edit-", dir=directory.parent) as name:
        work = Path(name)
        for place in ("old", "new"):
            (work / place).mkdir()
        old = make_editable(sdist, work / "old", patches)
        new, commit = unpack_sdist(release, work / "new")
        if commit is None:
            raise BuildError(f"{release}: it does not say which llama.cpp it vendors")
        upstream = Upstream(version, sha256_of(release), commit, revision=1)
        stopped = []
        for folder, tree in PARTS.items():
            (old / tree / ".git").rename(new / tree / ".git")
            repository = Repository(new / tree)
            repository.git("tag", OLD, PRISTINE)
            repository.git("tag", OLD_PATCHED, "HEAD")
            repository.git("tag", "--delete", PRISTINE)
            repository.git("reset", "--quiet", "--soft", OLD)
            _commit_release(repository, tree, release, version)
            stop = repository.apply(_patches_of(folder, patches), three_way=True)
            stopped += [stop] if stop else []
        _add_own_files(new, patches, upstream)
        _move(new, directory)
    return upstream, stopped


def apply_to(checkout: Path, sdist: Path, patches: Path) -> Stopped | None:
    """Commit the series, except for `wheel/`, on the new branch BRANCH of a llama.cpp checkout: a
    tag or a fork. What does not apply is merged three ways with the pinned tree.

    Returns the patch at which `git am` stopped. Raises BuildError if it is not a clean checkout of
    llama.cpp, or if it has that branch.
    """
    repository = Repository(checkout)
    if not (checkout / "src" / "llama-context.cpp").is_file() or not repository.has("HEAD"):
        raise BuildError(f"{checkout}: not a git checkout of llama.cpp")
    if repository.git("status", "--porcelain", "--untracked-files=no"):
        raise BuildError(f"{checkout}: it has changes; commit or stash them")
    if repository.has(BRANCH):
        raise BuildError(f"{checkout}: it has the branch {BRANCH}; git branch -D deletes it")
    commit = repository.git("rev-parse", "HEAD").strip()
    ours = {file: patches / "src" / file for file in overlay_files(patches)}
    if taken := [file for file in ours if (checkout / file).exists()]:
        raise BuildError(f"{checkout / taken[0]}: a file with that name exists")
    with tempfile.TemporaryDirectory(prefix="apply-") as name:
        root = make_editable(sdist, Path(name), patches)
        # a merge needs the files that the patches were made for
        repository.git("fetch", "--quiet", "--no-tags", str(root / VENDORED), "HEAD")
        repository.git("checkout", "--quiet", "-b", BRANCH)
        for file, source in ours.items():
            (checkout / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, checkout / file)
        header = BUILD_HEADER.relative_to(VENDORED)
        upstream = replace(read_upstream(patches), commit=commit)
        write_build_header(checkout, upstream, patch_digest(patches), header)
        repository.git("add", "--force", "--", *map(str, [*ours, header]))
        repository.git("commit", "--quiet", "-m", "llamacpp-instr: the recorder's own files")
        return repository.apply(_patches_of("", patches), three_way=True)


def fetch_release(version: str, cache: Path, log: BuildLog) -> Path:
    """The sdist of any release, by its version, unless `cache` has it.

    It is not verified, because its sha256 is not in the pin yet. Raises BuildError if pip cannot
    fetch it.
    """
    kept = cache / "sdist" / f"llama_cpp_python-{version}.tar.gz"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=kept.parent) as name:
            fetched, output = download_sdist(f"llama-cpp-python=={version}", Path(name), log)
            if fetched is None:
                raise log.failure(f"pip could not fetch llama-cpp-python {version}", output)
            fetched.replace(kept)
    return kept


def refuse_existing(directory: Path) -> None:
    """Raises BuildError unless `directory` is new or empty, so that a tree can be made there."""
    if not directory.parent.is_dir():
        raise BuildError(f"{directory.parent}: no such directory")
    if directory.is_dir() and not directory.is_symlink():
        if any(directory.iterdir()):
            raise BuildError(f"{directory}: it is not empty; name a new directory")
    elif directory.exists() or directory.is_symlink():
        raise BuildError(f"{directory}: it exists and is not a directory; name a new one")


def _commit_release(repository: Repository, tree: Path, sdist: Path, version: str) -> None:
    """Commit an unpacked release as `pristine`; its message is for `made_of`."""
    without = None if tree == VENDORED else VENDORED.as_posix()
    repository.commit_tree(f"llama-cpp-python {version}\n\nsha256 {sha256_of(sdist)}", without)
    repository.git("tag", PRISTINE)


def made_of(repository: Repository) -> tuple[str, str]:
    """Version and sha256 of the release in the commit `pristine`."""
    words = repository.git("log", "-1", "--format=%B", PRISTINE).split()
    return words[1], words[-1]


def _add_own_files(root: Path, patches: Path, upstream: Upstream) -> None:
    for file in overlay_files(patches):
        link = root / VENDORED / file
        if link.exists():
            raise BuildError(f"{patches / 'src' / file} would replace a file of llama.cpp")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to((patches / "src" / file).resolve())
    write_build_header(root, upstream, patch_digest(patches))


def _move(root: Path, directory: Path) -> None:
    if directory.is_dir():
        directory.rmdir()
    shutil.move(root, directory)
