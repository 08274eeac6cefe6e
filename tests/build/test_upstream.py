"""The pin and the digest: one source, parsed strictly, and a digest that covers every change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llamacpp_instr.base.errors import BuildError
from llamacpp_instr.llama.build import source_tree
from tests.kit import sdist_kit as kit


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    return kit.make_patches(tmp_path, kit.make_sdist(tmp_path))


def test_the_pin_of_this_checkout_is_whole() -> None:
    pin = source_tree.read_upstream(source_tree.patches_dir())
    assert pin.wheel_version == f"{pin.version}+instr.{pin.revision}"
    assert pin.revision >= 1
    text = (source_tree.patches_dir().parent / "pyproject.toml").read_text()
    assert f'"llama-cpp-python=={pin.version}"' in text, (
        "pyproject's extra `native` has another pin"
    )


def test_the_digest_depends_on_the_content_and_not_on_the_place(
    patches: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(patches, copy)
    assert source_tree.patch_digest(copy) == source_tree.patch_digest(patches)
    assert len(source_tree.patch_digest(patches)) == 12


@pytest.mark.parametrize(
    "name", ["UPSTREAM.toml", "series", "0001-count.patch", "src/src/llama-instrumentation.c"]
)
def test_every_file_of_the_patch_set_changes_the_digest(name: str, patches: Path) -> None:
    before = source_tree.patch_digest(patches)
    with (patches / name).open("a") as file:
        file.write("# changed\n")
    assert source_tree.patch_digest(patches) != before


def test_a_renamed_or_a_new_overlay_file_changes_the_digest(patches: Path) -> None:
    seen = {source_tree.patch_digest(patches)}
    ours = patches / "src" / "src" / "llama-instrumentation.c"
    ours.rename(ours.with_name("other.c"))
    seen.add(source_tree.patch_digest(patches))
    ours.write_text("")
    seen.add(source_tree.patch_digest(patches))
    assert len(seen) == 3


def test_what_is_no_part_of_the_build_does_not_change_the_digest(patches: Path) -> None:
    before = source_tree.patch_digest(patches)
    (patches / "README.md").write_text("words\n")
    (patches / "0009-not-in-the-series.patch").write_text("words\n")
    assert source_tree.patch_digest(patches) == before


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"0.3.36"', "0.3.36", r"UPSTREAM.toml:1: expected key = "),
        ('"0.3.36"', '"newest"', r"version must be text such as"),
        ("revision = 7", "", r"revision must be a number, got None"),
        ("revision = 7", 'revision = "7"', r"revision must be a number, got '7'"),
        ("c0ffee", "coffee", r"commit must be 40 hexadecimal digits"),
        ("sha256 = ", "sha512 = ", r"sha256 must be 64 hexadecimal digits, got None"),
        ("revision = 7", "revision = 7\nmirror = 1", r"unknown key 'mirror'"),
    ],
)
def test_a_wrong_pin_is_one_clear_line(old: str, new: str, message: str, patches: Path) -> None:
    path = patches / "UPSTREAM.toml"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(BuildError, match=message) as caught:
        source_tree.read_upstream(patches)
    assert "\n" not in str(caught.value)


def test_a_series_that_names_a_missing_patch_is_refused(patches: Path) -> None:
    (patches / "series").write_text("0002-gone.patch\n")
    with pytest.raises(BuildError, match=r"series: it names 0002-gone.patch, which does not exist"):
        source_tree.read_series(patches)
