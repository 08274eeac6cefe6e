"""`python -m tools.patches`: what `edit` unpacks, `export` writes back, the same for every user."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build import source_tree
from llamacpp_instr.llama.build.log import BuildLog
from tests.kit import patches_kit as kit
from tests.kit.patches_kit import ANSWER, COUNT, LESS, World, commit, git
from tools.patches.export import find_faults, render_series

pytestmark = pytest.mark.native


def apply_series(world: World, into: Path) -> Path:
    """The vendored llama.cpp with the patch set, as `instr build` makes it."""
    into.mkdir()
    log = BuildLog(into.with_suffix(".log"))
    root = source_tree.make_tree(world.sdist, into, world.patches, log, patched=True)
    return root / source_tree.VENDORED


# the tree


def test_every_patch_is_a_commit_after_pristine(world: World) -> None:
    titles = git(world.llama, "log", "--reverse", "--format=%s", "pristine..HEAD").splitlines()
    assert titles == ["count: one more", "answer: two"]
    assert git(world.tree, "log", "--format=%s", "pristine..HEAD") == "wheel: less of it\n"
    assert git(world.llama, "show", "pristine:src/llama.c") == "".join(kit.LINES)
    assert git(world.llama, "show", "pristine:tracked.ignored"), "though llama.cpp ignores it"
    assert git(world.llama, "status", "--porcelain") == git(world.tree, "status", "--porcelain")


def test_the_tree_is_the_one_that_is_built(world: World, tmp_path: Path) -> None:
    built = apply_series(world, tmp_path / "built")
    for path in built.rglob("*"):
        if path.is_file():
            mine = world.llama / path.relative_to(built)
            assert mine.read_bytes() == path.read_bytes(), path


def test_our_own_files_are_edited_where_they_are(world: World) -> None:
    (world.llama / "src" / "llama-instrumentation.h").write_text("int changed;\n")
    ours = world.patches / "src" / "src" / "llama-instrumentation.h"
    assert ours.read_text() == "int changed;\n"
    assert git(world.llama, "status", "--porcelain") == ""


def test_the_same_patches_give_the_same_commits(world: World) -> None:
    before = git(world.llama, "rev-parse", "HEAD")
    world.edit()
    assert git(world.llama, "rev-parse", "HEAD") == before


def test_edit_refuses_what_is_there(world: World, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="it is not empty"):
        kit.edit(world.sdist, world.tree, world.patches)
    with pytest.raises(BuildError, match="not a directory"):
        kit.edit(world.sdist, world.patches / "series", world.patches)
    with pytest.raises(BuildError, match="no such directory"):
        kit.edit(world.sdist, tmp_path / "a" / "b", world.patches)
    (tmp_path / "empty").mkdir()
    kit.edit(world.sdist, tmp_path / "empty", world.patches)
    assert (tmp_path / "empty" / ".git").is_dir()


def test_edit_leaves_nothing_when_a_patch_does_not_apply(world: World, tmp_path: Path) -> None:
    patch = world.patches / ANSWER
    patch.write_text(patch.read_text().replace("-line 20", "-line XX"))
    with pytest.raises(BuildError, match=rf"{ANSWER} does not apply.*src/llama\.c:17 differs"):
        kit.edit(world.sdist, tmp_path / "new", world.patches)
    assert {path.name for path in tmp_path.iterdir()} == {"patches", "tree"}


# and back


def test_exporting_right_after_editing_changes_nothing(world: World) -> None:
    before = world.bytes()
    exported = world.export()
    assert (exported.changed, exported.removed) == ([], [])
    assert exported.unchanged == [COUNT, ANSWER, LESS]
    assert world.bytes() == before


def test_a_change_comes_back_and_is_built(world: World, tmp_path: Path) -> None:
    (world.llama / "src" / "other.c").write_text("int h;\n")
    git(world.llama, "commit", "--all", "--amend", "--no-edit")
    assert world.export().changed == [ANSWER]
    built = apply_series(world, tmp_path / "built")
    assert (built / "src" / "other.c").read_text() == "int h;\n"


def test_a_patch_that_is_added_comes_last(world: World) -> None:
    commit(world.llama, "more: files", {"src/new.c": "int new;\n"})
    assert world.export().changed == ["0003-more-files.patch"]
    assert world.series() == ["# in order", COUNT, ANSWER, "0003-more-files.patch", LESS]


def test_a_patch_that_is_renamed_has_another_file(world: World) -> None:
    git(world.llama, "commit", "--amend", "-m", "answer: three\n\nOne more.")
    exported = world.export()
    assert exported.changed == ["0002-answer-three.patch"]
    assert exported.removed == [ANSWER]
    assert not (world.patches / ANSWER).exists()
    assert world.series() == ["# in order", COUNT, "0002-answer-three.patch", LESS]


def test_a_patch_that_is_dropped_is_gone(world: World) -> None:
    git(world.llama, "rebase", "--onto", "pristine", "HEAD^")
    exported = world.export()
    assert exported.changed == ["0001-answer-two.patch"]
    assert exported.removed == [COUNT, ANSWER]
    assert world.series() == ["# in order", "0001-answer-two.patch", LESS]


def test_patches_in_another_order_are_numbered_anew(world: World) -> None:
    count, answer = git(world.llama, "rev-list", "--reverse", "pristine..HEAD").split()
    git(world.llama, "reset", "--hard", "pristine")
    git(world.llama, "cherry-pick", answer, count)
    assert world.export().changed == ["0001-answer-two.patch", "0002-count-one-more.patch"]
    assert find_faults(world.sdist, world.patches) == [
        f"{world.patches / 'README.md'}: row `0001` lacks src/other.c",
        f"{world.patches / 'README.md'}: row `0002` has src/other.c, "
        "which the patch does not change",
    ]


def test_the_last_patch_of_a_kind_may_go(world: World) -> None:
    git(world.tree, "reset", "--hard", "pristine")
    assert world.export().removed == [LESS]
    assert not list((world.patches / "wheel").iterdir())


@pytest.mark.parametrize(
    "text", [b"ends\r\nlike this\r\n", b"no end", b"", b"nul \0\n", b"\xff\xfe\n", b" \t \n\n\n"]
)
def test_every_byte_comes_back(world: World, tmp_path: Path, text: bytes) -> None:
    for name in ("src/other.c", "src/new.c"):
        (world.llama / name).write_bytes(text)
    git(world.llama, "add", "--all")
    git(world.llama, "commit", "-m", "[x] y: z\n\nIt has to.")
    assert len(world.export().changed) == 1
    built = apply_series(world, tmp_path / "built")
    assert (built / "src/other.c").read_bytes() == (built / "src/new.c").read_bytes() == text
    before = world.bytes()
    world.edit()
    world.export()
    assert world.bytes() == before


def test_a_file_that_moves_is_one_that_goes_and_one_that_comes(world: World) -> None:
    """patch(1), which the build uses if git is missing, does not know renames."""
    git(world.llama, "mv", "src/llama.c", "src/moved.c")
    git(world.llama, "commit", "-m", "move: it\n\nIt has to.")
    world.export()
    assert "rename" not in (world.patches / "0003-move-it.patch").read_text()


content = st.binary(max_size=40) | st.text("ab \t\r\n\0é-+@", max_size=40).map(str.encode)
reason = st.text("ab '<>#-\té\n", min_size=1).filter(str.strip)


# an example takes a third of a second, so failing examples are not shrunk
@settings(max_examples=6, phases=[Phase.generate])
@given(st.data())
def test_whatever_is_committed_comes_back(
    shared_world: World, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("any")
    shutil.copytree(shared_world.patches, root / "patches")
    world = World(shared_world.sdist, root / "patches", root / "tree")
    shutil.copytree(shared_world.tree, world.tree, symlinks=True)
    for link in world.llama.rglob("llama-instrumentation.[ch]"):
        link.unlink()
    names = ["src/llama.c", "src/other.c", "a new file.c", "ä.txt"]
    for number in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(names))
        (world.llama / name).write_bytes(data.draw(content) + b"%d" % number)
        git(world.llama, "add", "--", name)
        title = data.draw(st.sampled_from(["a: b", "[x] y", "é", "so " * 40, "0001-x/../y.patch"]))
        message = f"{title}\n\n{data.draw(reason)}"
        git(world.llama, "commit", "--cleanup=strip", "-m", message, "-m", "It has to.")
    world.export()
    before = world.bytes()
    built = apply_series(world, root / "built")
    for name in names:
        if (world.llama / name).exists():
            assert (built / name).read_bytes() == (world.llama / name).read_bytes()
    world.edit()
    world.export()
    assert world.bytes() == before


# what is not written


def untracked(world: World) -> None:
    (world.llama / "src" / "new.c").write_text("int new;\n")


def uncommitted(world: World) -> None:
    (world.tree / "CMakeLists.txt").write_text("# none\n")


def without_reason(world: World) -> None:
    git(world.llama, "commit", "--amend", "-m", "answer: two")


def without_change(world: World) -> None:
    git(world.llama, "commit", "--allow-empty", "-m", "a: b\n\nIt has to.")


def merge(world: World) -> None:
    git(world.llama, "checkout", "-b", "side", "pristine")
    commit(world.llama, "on: the side", {"src/side.c": "int side;\n"})
    git(world.llama, "merge", "-m", "merge\n\nIt has to.", "series")


def half_a_rebase(world: World) -> None:
    git(world.llama, "-c", "sequence.editor=sed -i s/pick/edit/", "rebase", "-i", "pristine")


def another_pin(world: World) -> None:
    pin = world.patches / "UPSTREAM.toml"
    sha256 = source_tree.read_upstream(world.patches).sha256
    pin.write_text(pin.read_text().replace(sha256, "ab" * 32))


def history_of_its_own(world: World) -> None:
    git(world.llama, "checkout", "--orphan", "other")
    git(world.llama, "commit", "-m", "all: of it\n\nIt has to.")


def replaced_link(world: World) -> None:
    link = world.llama / "src" / "llama-instrumentation.h"
    link.unlink()
    link.write_text("int lost;\n")


def no_tree(world: World) -> None:
    shutil.rmtree(world.llama / ".git")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (untracked, r"src/new\.c not committed"),
        (uncommitted, r"CMakeLists\.txt not committed"),
        (without_reason, r"\(answer: two\) has no reason"),
        (without_change, r"\(a: b\) changes nothing"),
        (merge, r"\(merge\) is a merge"),
        (half_a_rebase, r"git am or git rebase is not finished"),
        (another_pin, rf"made from llama-cpp-python 0.3.36 with .* pins 0.3.36 with {'ab' * 32}"),
        (history_of_its_own, r"HEAD does not come after the tag pristine"),
        (replaced_link, r"an editor replaced the link; run: mv "),
        (no_tree, r"not a tree of `python -m tools.patches edit`"),
    ],
)
def test_export_refuses_in_one_line_and_writes_nothing(
    world: World, spoil: object, reason: str
) -> None:
    assert callable(spoil)
    spoil(world)
    before = world.bytes()
    with pytest.raises(BuildError, match=reason) as caught:
        world.export()
    assert "\n" not in str(caught.value)
    assert world.bytes() == before


def test_the_comments_of_the_series_stay_with_their_patches() -> None:
    old = (
        "# top\n\n0001-a.patch\n# of b\n0002-b.patch  # slow\n\n# ours\nwheel/0001-c.patch\n# end\n"
    )
    assert render_series(old, ["0001-a.patch", "0002-b.patch", "wheel/0001-c.patch"]) == old
    assert render_series(old, ["0001-b.patch", "0002-n.patch", "wheel/0001-d.patch"]) == (
        "# top\n\n# of b\n0001-b.patch  # slow\n0002-n.patch\nwheel/0001-d.patch\n\n# ours\n# end\n"
    )
    assert render_series("# top\n", ["0001-a.patch"]) == "# top\n0001-a.patch\n"
