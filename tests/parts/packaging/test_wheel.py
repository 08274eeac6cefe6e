"""The wheel has what a user needs and no more, and works without extras and without the library.

The build backend comes from the index, as for pip in a checkout. `python -m tools.release` tests
what needs a separate environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest

from llamacpp_instr.base.system import EXTRAS, how_to_install
from tools import release
from tools.oldest import load_bounds

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[3]
LOG = ROOT / "tests" / "fixtures" / "demo-verbose.log"
PLACES = {
    "llamacpp_instr": "llamacpp_instr",
    "converters": "llamacpp_instr/converters",
    "patches": "llamacpp_instr/patches",
}
"""folder of the checkout -> where the wheel has it"""
ABSENT = ("llama_cpp", *dict.fromkeys(name for _, names in EXTRAS.values() for name in names))
HEAVY = {"numpy", "pandas", "perfetto", "rich", "gguf", "matplotlib", "llama_cpp", "msgspec"}

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return release.build_distributions(ROOT, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(distributions: tuple[Path, Path]) -> zipfile.ZipFile:
    return zipfile.ZipFile(distributions[1])


@pytest.fixture(scope="module")
def installed(
    distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """An environment where the wheel precedes the checkout, without extras."""
    place = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", place]
    subprocess.run([*pip, distributions[1]], check=True)
    hide = tmp_path_factory.mktemp("hide")
    code = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT!r}))\n"
    (hide / "sitecustomize.py").write_text(code)
    return {**os.environ, "PYTHONPATH": f"{place}{os.pathsep}{hide}"}


@pytest.fixture
def run(installed: dict[str, str], tmp_path: Path) -> Run:
    shutil.copyfile(LOG, tmp_path / "session.log")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path, env=installed, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def test_the_wheel_has_one_package_whole_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in PLACES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected
    assert "llamacpp_instr/py.typed" in found
    assert "llamacpp_instr/patches/UPSTREAM.toml" in found
    assert "llamacpp_instr/data/demo.gguf" in found


def test_the_wheel_names_its_license_and_what_it_needs(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    for name in ("LICENSE", "NOTICE"):
        assert wheel.read(f"{info}/licenses/{name}") == (ROOT / name).read_bytes()
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    extras = metadata.get_all("Provides-Extra") or []
    assert sorted(extras) == sorted([*EXTRAS, "dev", "docs", "native", "peers", "test"])
    lines = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    needed = {line.partition(";")[0] for line in lines}
    bounds = {f"{name}>={bound}" for name, bound in load_bounds().items()}
    assert needed <= bounds
    assert len(needed) == 10


def test_the_sdist_builds_the_same_wheel(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    release.check_sdist(*distributions, tmp_path)


def test_an_installed_wheel_has_its_own_patches(run: Run, installed: dict[str, str]) -> None:
    place = installed["PYTHONPATH"].partition(os.pathsep)[0]
    done = run(
        "-c",
        "from llamacpp_instr.llama.build.source_tree import patch_digest, patches_dir\n"
        "print(patches_dir()); print(patch_digest(patches_dir()))",
    )
    found, digest = done.stdout.splitlines()
    assert found == f"{place}/llamacpp_instr/patches"
    from llamacpp_instr.llama.build.source_tree import patch_digest

    assert digest == patch_digest(ROOT / "patches")


def test_importing_the_package_imports_nothing_heavy(run: Run) -> None:
    done = run("-c", "import sys, llamacpp_instr.converters; print(*sys.modules)")
    loaded = set(done.stdout.split())
    assert "llamacpp_instr" in loaded
    # hidden modules are listed as None
    assert loaded & HEAVY - set(ABSENT) == set()


SCRIPT = """
import importlib.util, llamacpp_instr
beside = {name for name in ("benchmarks", "converters", "tests", "tools")
          if (found := importlib.util.find_spec(name)) and "decoys" not in str(found.origin)}
print(len(llamacpp_instr.load("session.log").tables.steps), llamacpp_instr.__file__, *beside)
"""


@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_one_name_can_be_imported_whatever_lies_beside_a_script(
    editable: bool, installed: dict[str, str], tmp_path: Path
) -> None:
    decoys = tmp_path / "decoys"
    decoys.mkdir()
    for name in ("converters", "log", "graph", "base", "report"):
        (decoys / f"{name}.py").write_text("raise SystemExit('the decoy ran')")
    (decoys / "script.py").write_text(SCRIPT)
    shutil.copyfile(LOG, decoys / "session.log")
    env = {name: value for name, value in installed.items() if name != "PYTHONPATH"}
    command = [sys.executable, "script.py"]
    if not editable:
        env = installed
    done = subprocess.run(command, cwd=decoys, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    steps, file, *beside = done.stdout.split()
    assert (int(steps) > 0, beside) == (True, [])
    place = ROOT / "tools" / "editable" if editable else Path(installed["PYTHONPATH"].split(":")[0])
    assert Path(file) == place / "llamacpp_instr" / "__init__.py"
    command = [sys.executable, "-m", "llamacpp_instr", "summary", "session.log"]
    done = subprocess.run(command, cwd=decoys, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("trial", release.TRIALS, ids=" ".join)
def test_a_command_that_needs_no_library_works_without_the_extras(
    trial: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    if "session.log.zst" in trial and trial[0] != "cat":
        assert run("-m", "llamacpp_instr", *release.TRIALS[2]).returncode == 0
    done = run("-m", "llamacpp_instr", *trial)
    assert done.returncode == 0, done.stderr
    assert done.stdout or len(list(tmp_path.iterdir())) > 1


def test_a_page_without_matplotlib_says_what_is_missing(run: Run, tmp_path: Path) -> None:
    assert run("-m", "llamacpp_instr", "inspect", "demo", "-o", "demo.html").returncode == 0
    page = (tmp_path / "demo.html").read_text(encoding="utf-8")
    assert "Charts need matplotlib: pip install &quot;llamacpp-instr[report]&quot;" in page


NEEDS = [
    ("collect session.log -o fleet --dask tcp://127.0.0.1:1", "dask"),
    ("collect session.log -o fleet", "fleet"),
    ("import model -o model.gguf", "hf"),
    ("run model --prompt hi", "hf"),
    ("validate demo --reference model", "onnx"),
    ("live session.log", "live"),
    ("weights demo --view", "live"),
    ("debug demo --prompt hi --page", "live"),
    ("to-onnx session.log -o graph.onnx", "onnx"),
    ("validate demo", "onnx"),
    ("to-otlp session.log", "otlp"),
    ("live session.log --otlp http://localhost:4318", "otlp"),
    ("to-parquet session.log -o tables", "parquet"),
    ("blocks demo blk.0.ffn_down.weight --heat-map picture.svg", "report"),
    ("schedule session.log --policy optimal", "schedule"),
    ("weights demo -o w.safetensors", "tensors"),
    ("to-flashinfer session.log -o data", "tensors"),
    ("run demo --prompt hi --capture all --output values", "tensors"),
    ("to-torch session.log -o data", "torch"),
    ("live session.log --tui", "tui"),
    ("view session.log", "view"),
]


def test_every_extra_has_a_command_that_names_it() -> None:
    assert {extra for _, extra in NEEDS} == set(EXTRAS) - {"predict"}  # the next test


def test_a_probe_says_first_what_it_leaves_out_without_an_extra(run: Run) -> None:
    done = run("-m", "llamacpp_instr", "probe", "-o", "machine.json")
    assert (done.returncode, done.stdout) == (2, "")
    missing, library = done.stderr.splitlines()
    assert missing.startswith("scipy is not installed, so the costs of kernels, which instr")
    assert missing.endswith(how_to_install("predict"))
    assert "run `instr build`" in library


@pytest.mark.parametrize(
    ("command", "cure"),
    [
        *((command, f"not installed: {how_to_install(extra)}") for command, extra in NEEDS),
        ("run demo --prompt hi", "run `instr build`"),
        ("quantize demo --types Q8_0", "run `instr build`"),
        ("quality demo demo", "run `instr build`, or use --only weights"),
        ("compare demo --types Q8_0", "run `instr build`"),
    ],
)
def test_what_is_missing_is_named_in_one_line(
    command: str, cure: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    done = run("-m", "llamacpp_instr", *command.split())
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: ")
    assert cure in line
    assert {entry.name for entry in tmp_path.iterdir()} == {"model", "session.log"}
