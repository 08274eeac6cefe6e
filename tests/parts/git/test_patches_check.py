"""Every error in a patch set gives one line; the real patch set has none."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.llama.build import source_tree
from llamacpp_instr.llama.build.log import BuildLog
from tests.kit.patches_kit import ANSWER, COUNT, LESS, World
from tools.patches.export import find_faults

pytestmark = pytest.mark.native


def edit_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


FAULTS: list[tuple[str, str, str, str]] = [
    # file, its text, the replacement, the finding
    (COUNT, "It has to.\n", "It has  to.\n", ""),
    (COUNT, "It has to.\n", "It has to. \n", "not as it is exported"),
    (COUNT, "@@ -2,7 +2,7 @@", "@@ -3,7 +3,7 @@", "not as it is exported"),
    (COUNT, "It has to.\n\n", "", r"has no reason"),
    (ANSWER, "-line 20", "-line 21", r"0002-answer-two.patch does not apply .*llama.c:17 differs"),
    ("series", f"{ANSWER}\n", "", rf"{ANSWER}: no line of .*series names it"),
    ("series", f"{COUNT}\n", "0009-gone.patch\n", r"series: it names 0009-gone.patch, which"),
    ("series", f"{ANSWER}\n{LESS}\n", f"{LESS}\n{ANSWER}\n", r"series: not in the order"),
    ("README.md", "| `0001`", "| `0009`", r"the table has no row `0001` for 0001-count"),
    ("README.md", "| `src/llama.c` |", "| `src/x.c` |", r"row `0001` lacks src/llama.c"),
    ("README.md", "| smaller |", "| |", r"row `wheel/0001` does not say why"),
    ("README.md", "| soon |", "| |", r"row `wheel/0001` does not say why, or when it can go"),
    ("README.md", "{c,h}", "{c,hpp}", r"files of src/ lacks llama-instrumentation.h"),
    ("src/src/llama-instrumentation.c", "#include", "//", ""),
    ("src/src/llama-instrumentation.c", "-instr", "", r"instrumentation.h: no patch and no other"),
]


@pytest.mark.parametrize(("name", "old", "new", "finding"), FAULTS)
def test_a_fault_of_the_patch_set_is_one_line(
    shared_world: World, tmp_path: Path, name: str, old: str, new: str, finding: str
) -> None:
    shutil.copytree(shared_world.patches, tmp_path / "patches")
    edit_text(tmp_path / "patches" / name, old, new)
    faults = find_faults(shared_world.sdist, tmp_path / "patches")
    if finding:
        assert any(re.search(finding, fault) for fault in faults), faults
        assert not any("\n" in fault for fault in faults)
    else:
        assert faults == []


def test_the_series_is_canonical_and_applies() -> None:
    """Git's export of the applied series equals the files in patches/, byte for byte."""
    patches = source_tree.patches_dir()
    sdist = source_tree.fetch_sdist(patches, cache_dir(), BuildLog(cache_dir() / "logs/tests.log"))
    assert find_faults(sdist, patches) == []
