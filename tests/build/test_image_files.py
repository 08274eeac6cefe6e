"""The container files are right, as far as that can be checked without a build.

`make image-test` builds the image. This finds errors that would not make it fail: an outdated
version or commit, and differences between the two Dockerfiles.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llamacpp_instr import __version__
from llamacpp_instr.llama.build import source_tree

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DOCKERFILES = [REPOSITORY / "docker" / name for name in ("Dockerfile", "Dockerfile.cuda")]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_labels_are_those_of_the_package_and_the_pin(path: Path) -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(.*)$", path.read_text(), re.MULTILINE))
    assert arguments["VERSION"] == __version__
    pin = source_tree.read_upstream(source_tree.patches_dir())
    assert arguments["LLAMA_CPP_COMMIT"] == pin.commit


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_stage_that_compiles_has_what_instr_build_imports(path: Path, tmp_path: Path) -> None:
    native = path.read_text().partition(" AS environment")[0].replace("\\\n", " ")
    copied = re.findall(r"^COPY (.+)$", native, re.MULTILINE)
    for *sources, target in map(str.split, copied):
        for source in sources:
            if source.endswith(".py"):
                place = tmp_path / target / Path(source).name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes((REPOSITORY / source).read_bytes())
            elif source.startswith("llamacpp_instr"):
                shutil.copytree(REPOSITORY / source, tmp_path / target)
    code = "import sys, llamacpp_instr.llama.build.wheel as b; print(b.__file__)"
    code += "; from llamacpp_instr.cli import main, build"
    code += "; installed = [n for n, m in sys.modules.items() if 'site-packages' in str(m)]"
    code += "; print(*{n.partition('.')[0] for n in installed} - {'_distutils_hack'})"
    command = [sys.executable, "-c", f"{code}; main(['build', '--help'])"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, packages, *_ = done.stdout.splitlines()
    assert file.startswith(str(tmp_path))
    assert f'pip install --no-cache-dir "{packages}>=' in native


def test_the_image_for_gpus_differs_only_where_it_must() -> None:
    """Lines that only one of them has, without comments."""
    plain, cuda = (
        [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        for path in DOCKERFILES
    )
    added = [line for line in cuda if line not in plain]
    assert [line for line in plain if line not in cuda] == [
        "ARG BASE=debian:bookworm-slim",
        "FROM ${BASE} AS native",
        "FROM ${BASE}",
        *[line for line in plain if line.startswith("ENV PATH=")],
        *[line for line in plain if line.startswith("LABEL ")],
    ]
    assert all(re.search("(?i)cuda|architectures|ubuntu", line) for line in added), added


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_base_image_is_named_by_a_tag_that_anyone_can_pull(path: Path) -> None:
    bases = re.findall(r"^FROM (\S+)", path.read_text(), re.MULTILINE)
    assert bases
    assert not [base for base in bases if "@sha256" in base]
