"""Carrying the series to another release and back, and the commands for it."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build import source_tree
from llamacpp_instr.llama.build.log import BuildLog
from llamacpp_instr.llama.build.source_tree import Upstream
from tests.kit import sdist_kit
from tests.kit.patches_kit import ANSWER, COUNT, FILES, LESS, World, commit, counted, git
from tools.patches import __main__ as command
from tools.patches import edit as editing
from tools.patches.export import find_faults
from tools.patches.repository import Stopped

pytestmark = pytest.mark.native

NEWER = "0.3.37"
LLAMA = "vendor/llama.cpp/src/llama.c"


def release(directory: Path, files: dict[str, str]) -> Path:
    """An sdist of another release, with some files changed."""
    directory.mkdir(exist_ok=True)
    other = {".git/modules/vendor/llama.cpp/HEAD": "ab" * 20 + "\n"}
    version = {"llama_cpp/__init__.py": f'__version__ = "{NEWER}"\n'}
    return sdist_kit.make_sdist(directory, {**FILES, **other, **version, **files})


def set_pin(patches: Path, pin: Upstream) -> None:
    lines = [f'{key} = "{getattr(pin, key)}"\n' for key in ("version", "sha256", "commit")]
    (patches / "UPSTREAM.toml").write_text("".join([*lines, "revision = 1\n"]))


def carry(world: World, sdist: Path) -> tuple[Upstream, list[Stopped]]:
    return editing.carry(world.sdist, sdist, NEWER, world.tree.with_name("carried"), world.patches)


def test_a_series_is_carried_over_and_back(world: World, tmp_path: Path) -> None:
    before = world.bytes()
    # next to the lines that the patches change: those do not apply as such, so git merges them
    newer = release(tmp_path / "newer", {LLAMA: "zero\n" + counted((23, "their 23"), (8, "their"))})
    pin, stopped = carry(world, newer)
    assert stopped == []
    assert (pin.version, pin.commit) == (NEWER, "ab" * 20)
    carried = World(newer, world.patches, world.tree.with_name("carried"))
    assert "five" in (carried.llama / "src/llama.c").read_text()
    header = (carried.tree / source_tree.BUILD_HEADER).read_text()
    assert f'LLAMA_INSTR_BUILD_COMMIT    "{pin.commit}"' in header
    with pytest.raises(BuildError, match=rf"from llama-cpp-python {NEWER} .* set the pin first"):
        carried.export()

    set_pin(world.patches, pin)
    assert carried.export().changed == [COUNT, ANSWER]
    assert find_faults(newer, world.patches) == []

    pin, stopped = editing.carry(newer, world.sdist, "0.3.36", tmp_path / "back", world.patches)
    assert stopped == []
    set_pin(world.patches, pin)
    World(world.sdist, world.patches, tmp_path / "back").export()
    after = world.bytes()
    assert {name: after[name] for name in after if name != "UPSTREAM.toml"} == {
        name: before[name] for name in before if name != "UPSTREAM.toml"
    }


def test_a_conflict_is_named_and_the_rest_follows_its_resolution(
    world: World, tmp_path: Path
) -> None:
    newer = release(tmp_path / "newer", {LLAMA: counted((5, "their five"))})
    pin, stopped = carry(world, newer)
    assert [(stop.patch, stop.files) for stop in stopped] == [
        (world.patches / COUNT, ["src/llama.c"])
    ]
    set_pin(world.patches, pin)
    carried = World(newer, world.patches, world.tree.with_name("carried"))
    conflict = (carried.llama / "src/llama.c").read_text()
    assert "\ntheir five\n|||||||" in conflict, "with what the patch was made for"
    with pytest.raises(BuildError, match="git am or git rebase is not finished"):
        carried.export()
    (carried.llama / "src/llama.c").write_text(counted((5, "our five llama-instrumentation.c")))
    git(carried.llama, "add", "src/llama.c")
    git(carried.llama, "am", "--continue")
    assert carried.export().changed == [COUNT, ANSWER]
    assert find_faults(newer, world.patches) == []
    titles = git(carried.llama, "log", "--format=%s", "old-pristine..old-patched").splitlines()
    assert titles == ["answer: two", "count: one more"]


def test_a_file_of_ours_that_upstream_has_too_is_refused(world: World, tmp_path: Path) -> None:
    newer = release(
        tmp_path / "newer", {"vendor/llama.cpp/src/llama-instrumentation.h": "theirs\n"}
    )
    with pytest.raises(BuildError, match=r"llama-instrumentation\.h would replace a file"):
        carry(world, newer)
    assert not world.tree.with_name("carried").exists()


def test_an_sdist_that_does_not_name_its_llama_cpp_is_refused(world: World, tmp_path: Path) -> None:
    newer = release(tmp_path / "newer", {".git/modules/vendor/llama.cpp/HEAD": "main\n"})
    with pytest.raises(BuildError, match=r"does not say which llama\.cpp it vendors"):
        carry(world, newer)


def test_a_release_comes_from_the_index_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    sdist_kit.make_sdist(index)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    log = BuildLog(tmp_path / "log")
    with pytest.raises(BuildError, match=r"pip could not fetch llama-cpp-python 9\.9"):
        editing.fetch_release("9.9", tmp_path / "cache", log)
    sdist = editing.fetch_release(sdist_kit.VERSION, tmp_path / "cache", log)
    assert tarfile.is_tarfile(sdist)
    (index / f"{sdist_kit.ROOT}.tar.gz").unlink()
    assert editing.fetch_release(sdist_kit.VERSION, tmp_path / "cache", log) == sdist


# the commands


@pytest.fixture
def at_home(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose patches the commands use, and whose releases are cached."""
    cache = tmp_path / "cache" / "sdist"
    cache.mkdir(parents=True)
    (cache / f"{sdist_kit.ROOT}.tar.gz").write_bytes(world.sdist.read_bytes())
    newer = release(tmp_path / "newer", {LLAMA: counted((5, "their five"))})
    newer.rename(cache / f"llama_cpp_python-{NEWER}.tar.gz")
    monkeypatch.setattr(command, "patches_dir", lambda: world.patches)
    monkeypatch.setenv("LLAMACPP_INSTR_CACHE", str(tmp_path / "cache"))
    return world


def test_edit_export_and_check_say_what_they_did(
    at_home: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "own"
    assert command.main(["edit", str(tree)]) == 0
    assert f"python -m tools.patches export {tree}" in capsys.readouterr().out
    assert command.main(["edit", str(tree)]) == 1
    assert capsys.readouterr().err == f"Error: {tree}: it is not empty; name a new directory\n"
    git(tree, "commit", "--amend", "-m", "wheel: smaller\n\nIt has to.")
    assert command.main(["export", str(tree)]) == 0
    printed = capsys.readouterr().out
    assert "written: wheel/0001-wheel-smaller.patch\n" in printed
    assert f"removed: {LESS}\n" in printed
    assert "unchanged: 2 patches\n" in printed
    assert command.main(["check"]) == 0
    assert "canonical" in capsys.readouterr().out
    (at_home.patches / "README.md").write_text("")
    assert command.main(["check"]) == 1
    assert "the table has no row `0001` for" in capsys.readouterr().out


def test_edit_onto_names_the_conflict_and_the_pin(
    at_home: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "own"
    assert command.main(["edit", str(tree), "--onto", NEWER]) == 0
    printed = capsys.readouterr().out
    assert f"{COUNT}: conflicts in src/llama.c\n" in printed
    assert f"  in {tree}/vendor/llama.cpp: resolve, git add, git am --continue" in printed
    sdist = tmp_path / "cache" / "sdist" / f"llama_cpp_python-{NEWER}.tar.gz"
    assert f'version = "{NEWER}"' in printed
    assert f'sha256 = "{source_tree.sha256_of(sdist)}"' in printed
    assert f'commit = "{"ab" * 20}"' in printed
    assert at_home.bytes()["UPSTREAM.toml"].startswith(b'version = "0.3.36"')


@pytest.mark.parametrize("arguments", [[], ["edit"], ["edit", "x", "--onto", "latest"], ["apply"]])
def test_wrong_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err


# --- a checkout of llama.cpp ---


def fork(directory: Path, files: dict[str, str]) -> Path:
    """A checkout of the tiny llama.cpp with changes of its own."""
    directory.mkdir()
    git(directory, "init", "--quiet")
    for key, value in (("user.name", "Somebody"), ("user.email", "somebody@example.com")):
        git(directory, "config", key, value)
    known = {name: FILES[f"vendor/llama.cpp/{name}"] for name in ("src/llama.c", "src/other.c")}
    commit(directory, "A fork", {**known, "src/llama-context.cpp": "", **files})
    return directory


def test_a_fork_gets_a_branch_with_the_patches(world: World, tmp_path: Path) -> None:
    changed = {"src/llama.c": "zero\n" + counted((23, "their 23"), (8, "their"))}
    checkout = fork(tmp_path / "fork", changed)
    head = git(checkout, "rev-parse", "HEAD").strip()
    assert editing.apply_to(checkout, world.sdist, world.patches) is None
    assert git(checkout, "branch", "--show-current").strip() == editing.BRANCH
    assert git(checkout, "log", "--format=%s", "--reverse", f"{head}..").splitlines() == [
        "llamacpp-instr: the recorder's own files", "count: one more", "answer: two"
    ]  # fmt: skip
    text = (checkout / "src/llama.c").read_text()
    assert "five" in text
    assert "their 23" in text
    header = (checkout / source_tree.BUILD_HEADER.relative_to(source_tree.VENDORED)).read_text()
    assert head in header
    assert not git(checkout, "status", "--porcelain")


def test_a_conflict_in_a_fork_is_left_for_its_owner(world: World, tmp_path: Path) -> None:
    checkout = fork(tmp_path / "fork", {"src/llama.c": counted((5, "mine"), (6, "mine"))})
    stopped = editing.apply_to(checkout, world.sdist, world.patches)
    assert stopped is not None
    assert (stopped.patch.name, stopped.files) == (COUNT, ["src/llama.c"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda at: (at / "src/llama-context.cpp").unlink(), "not a git checkout of llama.cpp"),
        (lambda at: (at / "src/llama.c").write_text("new"), "it has changes"),
        (lambda at: git(at, "branch", editing.BRANCH), "it has the branch"),
    ],
)
def test_a_checkout_that_cannot_be_patched(
    spoil: Callable[[Path], object], message: str, world: World, tmp_path: Path
) -> None:
    checkout = fork(tmp_path / "fork", {})
    spoil(checkout)
    before = git(checkout, "rev-parse", "HEAD")
    with pytest.raises(BuildError, match=message):
        editing.apply_to(checkout, world.sdist, world.patches)
    assert git(checkout, "rev-parse", "HEAD") == before
