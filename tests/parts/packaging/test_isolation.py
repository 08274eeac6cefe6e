"""No code in the working directory runs, whatever its files are called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from llamacpp_instr.base.system import pip, python
from tests.conftest import assert_refused

pytestmark = pytest.mark.native

INSTR = Path(sys.executable).parent / "instr"
SPY = "open({mark!r}, 'a').write(__name__ + '\\n')\nraise SystemExit('ran ' + __file__)\n"
MODULES = sorted(
    (set(sys.stdlib_module_names) - set(sys.builtin_module_names))
    | {"llama_cpp", "llamacpp_instr", "numpy", "pip", "setuptools", "click", "msgspec", "gguf"}
    | {"converters", "log", "graph"}
)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with a module of every name; each writes a line when it runs."""
    directory = tmp_path / "cwd"
    directory.mkdir()
    for name in MODULES:
        (directory / f"{name}.py").write_text(SPY.format(mark=str(tmp_path / "ran")))
    return directory


def run(
    place: Path, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(INSTR), *arguments], cwd=place, env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    ran = place.parent / "ran"
    assert not ran.exists(), ran.read_text()
    return done


@pytest.mark.parametrize(
    "line",
    [
        "doctor",
        "run demo -p Once -n 1",
        "report demo --ctx 64",
        "quantize demo --types Q8_0 --dry-run",
        "exec -- true",
        "build --check",
    ],
)
def test_commands(place: Path, environment: dict[str, str], line: str) -> None:
    done = run(place, environment, *line.split())
    assert done.returncode == 0, done.stderr


def test_pip(place: Path, environment: dict[str, str]) -> None:
    """It runs to fetch the sdist if that is not cached."""
    none = {"LLAMACPP_INSTR_CACHE": str(place / "cache"), "PIP_NO_INDEX": "1"}
    done = run(place, environment | none, "build", "--check")
    assert done.returncode == 1
    assert "pip could not fetch" in done.stderr


def test_a_program_elsewhere(place: Path, environment: dict[str, str]) -> None:
    application = place.parent / "app.py"
    application.write_text("import json; print(json.dumps(1))")
    python_311 = () if sys.version_info < (3, 11) else ("-P",)
    for options in ((), ("-B",), ("-W", "ignore", "-Xutf8"), ("-I",), python_311):
        done = run(place, environment, "exec", "--", sys.executable, *options, str(application))
        assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    script = place.parent / "script"
    first = f"#!{sys.executable}"
    if " " in first:  # as pip writes it
        first = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''"
    script.write_text(f"{first}\nprint(2)")
    script.chmod(0o700)
    assert run(place, environment, "exec", "--", str(script)).stdout == "2\n"


def test_the_library_is_sought_where_the_program_seeks_it(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Beside the program; in the working directory only with -m and -c, and never with -I."""
    package = tmp_path / "beside" / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "lib" / "libllama.so").write_bytes(b"\x7fELF, but not ours")
    (tmp_path / "beside" / "app.py").write_text("print(1)")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "app.py").write_text("print(1)")
    cases = [
        (tmp_path, ("beside/app.py",), True),
        (tmp_path, ("-X", "utf8", "beside/app.py"), True),
        (tmp_path, ("-I", "beside/app.py"), False),
        (tmp_path / "beside", ("../elsewhere/app.py",), False),
        (tmp_path / "beside", ("-c", "print(1)"), True),
        (tmp_path / "beside", ("-m", "app"), True),
        (tmp_path / "beside", ("-Ic", "print(1)"), False),
    ]
    environment = {k: v for k, v in environment.items() if k != "LLAMA_CPP_LIB_PATH"}
    for directory, arguments, is_refused in cases:
        command = [str(INSTR), "exec", "--", sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, check=False
        )
        if is_refused:
            assert_refused(done, "not the patched one", str(package / "lib"))
        else:
            assert (done.returncode, done.stdout) == (0, "1\n"), (arguments, done.stderr)


def test_a_child_imports_what_its_parent_imports(place: Path) -> None:
    code = "import json, llamacpp_instr; print(llamacpp_instr.__file__, sys.argv[1], sep='\\n')"
    done = subprocess.run(
        python(code, "argument"), cwd=place, capture_output=True, text=True, check=True
    )
    import llamacpp_instr

    file, argument = done.stdout.splitlines()
    assert Path(file).samefile(llamacpp_instr.__file__)
    assert argument == "argument"
    asked = subprocess.run(pip("--version"), cwd=place, capture_output=True, text=True, check=True)
    assert asked.stdout.startswith("pip ")
