"""The Dockerfile is right, as far as that can be checked without a build.

`make image-test` builds the image. This finds errors that would not make it fail: an outdated
version or commit.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from llamacpp_instr import __version__
from llamacpp_instr.llama.build import BACKENDS, source_tree

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DOCKERFILE = (REPOSITORY / "docker" / "Dockerfile").read_text()
ARGUMENTS = dict(re.findall(r"^ARG (\w+)=(.*)$", DOCKERFILE, re.MULTILINE))


def test_labels_are_those_of_the_package_and_the_pin() -> None:
    assert ARGUMENTS["VERSION"] == __version__
    pin = source_tree.read_upstream(source_tree.patches_dir())
    assert ARGUMENTS["LLAMA_CPP_COMMIT"] == pin.commit


def test_the_stage_that_compiles_has_what_instr_build_imports(tmp_path: Path) -> None:
    native = DOCKERFILE.partition(" AS environment")[0].replace("\\\n", " ")
    copied = re.findall(r"^COPY (.+)$", native, re.MULTILINE)
    for *sources, target in map(str.split, copied):
        for source in sources:
            if source.endswith(".py"):
                place = tmp_path / target / Path(source).name
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes((REPOSITORY / source).read_bytes())
            elif source.startswith("llamacpp_instr"):
                shutil.copytree(REPOSITORY / source, tmp_path / target)
    # leave out what the installation imports at its start
    code = "import sys; before = set(sys.modules)"
    code += "; import llamacpp_instr.llama.build.wheel as b; print(b.__file__)"
    code += "; from llamacpp_instr.cli import main, build"
    code += "; new = sys.modules.keys() - before"
    code += "; installed = {n for n in new if 'site-packages' in str(sys.modules[n])}"
    code += "; print(*{n.partition('.')[0] for n in installed})"
    command = [sys.executable, "-c", f"{code}; main(['build', '--help'])"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, packages, *_ = done.stdout.splitlines()
    assert file.startswith(str(tmp_path))
    assert f'pip install --no-cache-dir "{packages}>=' in native


def test_both_stages_begin_with_the_same_image_that_anyone_can_pull() -> None:
    assert ARGUMENTS["BASE"] == ARGUMENTS["RUNTIME"]
    assert re.fullmatch(r"debian:\w+-slim", ARGUMENTS["BASE"])
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) == {"${BASE}", "${RUNTIME}"}


def test_the_images_for_gpus_have_arguments_that_the_dockerfile_takes() -> None:
    readme = (REPOSITORY / "docker" / "README.md").read_text().replace("\\\n", " ")
    builds = re.findall(r"^docker build .*$", readme.partition("## GPU")[2], re.MULTILINE)
    given = [dict(re.findall(r"--build-arg (\w+)=(\".*?\"|\S+)", command)) for command in builds]
    assert [arguments["BACKEND"] for arguments in given] == ["vulkan", "cuda"]
    for arguments in given:
        assert arguments["BACKEND"] in BACKENDS
        assert arguments.keys() <= ARGUMENTS.keys()
        assert arguments["BASE"].replace("-devel-", "-runtime-") == arguments["RUNTIME"]
    makefile = (REPOSITORY / "Makefile").read_text()
    (made,) = re.findall(r"--build-arg BACKEND=vulkan .*", makefile)
    assert dict(re.findall(r"--build-arg (\w+)=([^\s\"]+)", made)) == given[0]


def test_the_image_for_arm64_is_the_one_of_the_readme() -> None:
    readme = (REPOSITORY / "docker" / "README.md").read_text().replace("\\\n", " ")
    (cross,) = re.findall(r"^docker build --platform linux/arm64 .*$", readme, re.MULTILINE)
    makefile = (REPOSITORY / "Makefile").read_text().replace("\\\n", " ")
    (made,) = re.findall(r"--build-arg TARGETARCH=arm64 .*?\"", makefile)
    arguments = [dict(re.findall(r"--build-arg (\w+)=([^\s\"]+)", text)) for text in (cross, made)]
    assert arguments[0] | {"TARGETARCH": "arm64"} == arguments[1]
    assert arguments[0].keys() <= ARGUMENTS.keys()
