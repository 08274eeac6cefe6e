"""Our C and C++ compile without warnings under llama.cpp's own flags."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from llamacpp_instr.base.machine import usable_cpus
from tests.programs.lint_native import Tree, configured, own_files, patched_files

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return configured(tmp_path_factory.mktemp("build"))


def test_our_files_give_no_warning(tree: Tree) -> None:
    files = own_files()
    assert len(files) > 5
    with ThreadPoolExecutor(usable_cpus()) as pool:
        warnings = dict(zip(files, pool.map(tree.warnings, files), strict=True))
    assert warnings == dict.fromkeys(files, "")


def test_all_files_are_known_to_the_build(tree: Tree) -> None:
    assert set(own_files()) | set(patched_files()) <= set(tree.commands)


@pytest.mark.parametrize(
    ("line", "warning"),
    [
        ("int unused(int x) { return 0; }", "unused-parameter"),
        ("int undeclared(void) { return 0; }", "missing-"),
        ("double promoted(float x); double promoted(float x) { return x + 1.0; }", "promotion"),
    ],
)
def test_a_warning_is_found(tree: Tree, tmp_path: Path, line: str, warning: str) -> None:
    file = "ggml/src/ggml-instrumentation.c"
    damaged = tmp_path / "damaged.c"
    damaged.write_text((tree.root / file).read_text() + line + "\n")
    source = str(tree.root / file)
    command = [str(damaged) if word == source else word for word in tree.commands[file]]
    command += [f"-I{(tree.root / file).parent}"]
    warnings = replace(tree, commands={file: command}).warnings(file)
    assert "[-Werror=" in warnings
    assert warning in warnings
