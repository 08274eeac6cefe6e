"""The patched tree: only from the pinned sdist, only inside its folder, only patches that fit."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build import source_tree
from llamacpp_instr.llama.build.log import BuildLog
from tests.kit import sdist_kit as kit

MakeTree = Callable[..., Path]


@pytest.fixture
def make_tree(tmp_path: Path) -> MakeTree:
    def make(files: dict[str, str] | None = None, patches: dict[str, str] | None = None,
             patched: bool = True) -> Path:  # fmt: skip
        sdist = kit.make_sdist(tmp_path, files)
        directory = kit.make_patches(tmp_path, sdist, patches)
        into = tmp_path / "work"
        into.mkdir()
        log = BuildLog(tmp_path / "build.log")
        return source_tree.make_tree(sdist, into, directory, log, patched=patched)

    return make


@pytest.mark.native
def test_a_patched_tree_has_patch_overlay_header_and_version(make_tree: MakeTree) -> None:
    root = make_tree()
    vendored = root / "vendor" / "llama.cpp" / "src"
    assert (vendored / "llama.c").read_text() == "one\ntwo\nthree\nfour\n"
    assert (vendored / "llama-instrumentation.c").read_text() == "ours\n"
    assert (root / "llama_cpp" / "__init__.py").read_text() == '__version__ = "0.3.36+instr.7"\n'
    header = (vendored / "llama-instrumentation-build.h").read_text()
    digest = source_tree.patch_digest(root.parent.parent / "patches")
    assert '#define LLAMA_INSTR_BUILD_LLAMA_CPP "0.3.36+instr.7"\n' in header
    assert f'#define LLAMA_INSTR_BUILD_COMMIT    "{kit.COMMIT}"\n' in header
    assert f'#define LLAMA_INSTR_BUILD_PATCHES   "{digest}"\n' in header


@pytest.mark.native
def test_an_unpatched_tree_is_the_sdist_but_for_the_wheel(make_tree: MakeTree) -> None:
    wheel_patch = kit.PATCH.replace("src/llama.c", "vendor/llama.cpp/src/wheel.c")
    files = {"vendor/llama.cpp/src/wheel.c": "one\ntwo\nthree\n"}
    both = {"0001-count.patch": kit.PATCH, "wheel/0001-wheel.patch": wheel_patch}
    root = make_tree(files, both, patched=False)
    expected = {**kit.FILES, **files}
    expected["vendor/llama.cpp/src/wheel.c"] += "four\n"
    found = {
        path.relative_to(root).as_posix(): path.read_text()
        for path in root.rglob("*")
        if path.is_file()
    }
    assert found == {name: text for name, text in expected.items() if ".git" not in name}


@pytest.fixture(params=["git", "patch"])
def only_program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build finds only one of the two programs; a user's machine may lack either."""
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name: which(name) if name == request.param else None
    )


@pytest.mark.usefixtures("only_program")
def test_a_patch_that_does_not_fit_is_named_with_its_file(make_tree: MakeTree) -> None:
    bad = kit.PATCH.replace(" two", " zwei")
    with pytest.raises(BuildError) as caught:
        make_tree(patches={"0001-good.patch": kit.PATCH, "0002-bad.patch": bad})
    message = str(caught.value)
    assert "0002-bad.patch does not apply" in message
    assert "src/llama.c:1 differs" in message
    assert "build.log" in message
    assert "\n" not in message


@pytest.mark.usefixtures("only_program")
def test_a_patch_for_a_missing_file_is_named_with_it(make_tree: MakeTree) -> None:
    with pytest.raises(BuildError, match=r"0001-x.patch does not apply.*src/gone.c: [Nn]o such"):
        make_tree(patches={"0001-x.patch": kit.PATCH.replace("llama.c", "gone.c")})


@pytest.mark.native
def test_git_applies_inside_another_repository(
    tmp_path: Path, make_tree: MakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    root = make_tree()
    assert "four" in (root / "vendor" / "llama.cpp" / "src" / "llama.c").read_text()


@pytest.mark.native
def test_an_overlay_must_not_replace_a_file_of_llama_cpp(make_tree: MakeTree) -> None:
    with pytest.raises(BuildError, match=r"llama-instrumentation\.c would replace a file"):
        make_tree({"vendor/llama.cpp/src/llama-instrumentation.c": "theirs\n"})


def test_the_commit_of_the_pin_must_be_the_vendored_one(make_tree: MakeTree) -> None:
    other = "ab" * 20
    with pytest.raises(BuildError, match=rf"vendors llama.cpp {other}, but .*UPSTREAM.toml:3 says"):
        make_tree({".git/modules/vendor/llama.cpp/HEAD": f"{other}\n"})


@pytest.mark.native
def test_another_version_in_the_sdist_is_refused(make_tree: MakeTree) -> None:
    with pytest.raises(BuildError, match=r'no line __version__ = "0.3.36"'):
        make_tree({"llama_cpp/__init__.py": '__version__ = "0.3.37"\n'})


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("../evil", tarfile.REGTYPE, "would be written outside"),
        ("/tmp/evil", tarfile.REGTYPE, "would be written outside"),
        (f"{kit.ROOT}/../../evil", tarfile.REGTYPE, "would be written outside"),
        (f"{kit.ROOT}/link", tarfile.SYMTYPE, "is not a file or directory"),
        (f"{kit.ROOT}/link", tarfile.LNKTYPE, "is not a file or directory"),
        (f"{kit.ROOT}/fifo", tarfile.FIFOTYPE, "is not a file or directory"),
    ],
)
def test_unpacking_writes_nothing_outside(
    name: str, kind: bytes, reason: str, tmp_path: Path
) -> None:
    sdist = tmp_path / "evil.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type = kind
        member.linkname = "/etc/passwd"
        member.size = 2 if kind == tarfile.REGTYPE else 0
        archive.addfile(member, io.BytesIO(b"hi"))
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(BuildError, match=reason):
        source_tree.unpack_sdist(sdist, into)
    assert {path.name for path in tmp_path.iterdir()} == {"evil.tar.gz", "into"}
    assert not list(into.iterdir())


@pytest.mark.parametrize("size", [0, 200])
def test_a_truncated_sdist_is_one_line(size: int, tmp_path: Path) -> None:
    sdist = kit.make_sdist(tmp_path)
    sdist.write_bytes(sdist.read_bytes()[:size])
    with pytest.raises(BuildError, match=r"cannot be unpacked|it has no"):
        source_tree.unpack_sdist(sdist, tmp_path / "into")


def test_another_sha256_names_the_line_of_the_pin(tmp_path: Path) -> None:
    sdist = kit.make_sdist(tmp_path)
    patches = kit.make_patches(tmp_path, sdist)
    source_tree.check_sdist(source_tree.sha256_of(sdist), patches)
    sdist.write_bytes(sdist.read_bytes() + b"\0")
    with pytest.raises(BuildError) as caught:
        source_tree.check_sdist(source_tree.sha256_of(sdist), patches)
    assert f"{patches / 'UPSTREAM.toml'}:2 says" in str(caught.value)
    assert source_tree.sha256_of(sdist) in str(caught.value)
