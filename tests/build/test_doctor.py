"""`instr doctor` names the problem and the remedy, whatever the state of llama_cpp."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from llamacpp_instr import cli
from llamacpp_instr.base.system import EXTRAS
from llamacpp_instr.llama.build import doctor
from llamacpp_instr.llama.build.doctor import Library, library_problems

pytestmark = pytest.mark.native


@pytest.fixture
def llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A llama_cpp that precedes any installed one; the test writes its `__init__.py`."""
    package = tmp_path / "llama_cpp"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    return package / "__init__.py"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os; os.abort()", "loading it ends with SIGABRT"),
        ("import os; os.kill(os.getpid(), 4)", "SIGILL (it was built for another CPU)"),
        ("raise RuntimeError('no\\nlibrary')", "library"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise SystemExit(3)", "it prints nothing"),
        ("import time; time.sleep(600)", "takes more than"),
    ],
)
def test_a_broken_llama_cpp_is_a_finding(
    code: str, error: str, llama_cpp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama_cpp.write_text(code)
    # the others may take their time
    monkeypatch.setattr(doctor, "PROBE_SECONDS", 2 if "sleep" in code else 300)
    found = doctor.diagnose()
    assert error in found.library.error
    assert any(p.startswith("llama_cpp cannot be loaded: ") for p in found.problems)
    assert not found.ok


def test_a_broken_llama_cpp_is_reported_without_a_traceback(llama_cpp: Path) -> None:
    llama_cpp.write_text("raise OSError('libllama.so: cannot open shared object file')")
    result = CliRunner().invoke(cli.main, ["doctor"])
    assert result.exit_code == 1
    assert "problem: llama_cpp cannot be loaded: OSError: libllama.so: cannot open" in result.output
    assert "run: instr build" in result.output
    assert "Traceback" not in result.output
    result = CliRunner().invoke(cli.main, ["doctor", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False


def test_an_uninstrumented_llama_cpp_is_recognized(llama_cpp: Path) -> None:
    llama_cpp.write_text(
        "import ctypes\n"
        "from llama_cpp import llama_cpp\n"
        "__version__ = '0.3.36'\n"
        "llama_print_system_info = lambda: b'CPU : AVX2 = 1 | OPENMP = 1 | '\n"
    )
    llama_cpp.with_name("llama_cpp.py").write_text("import ctypes\n_lib = ctypes.CDLL(None)\n")
    found = doctor.diagnose()
    assert found.library.features == ["CPU : AVX2 = 1", "OPENMP = 1"]
    assert found.library.abi is None
    assert any("(llama-cpp-python 0.3.36) is not the instrumented" in p for p in found.problems)


GOOD = Library(version="0.3.36+instr.1", path="/l/libllama.so", abi=doctor.ABI, patches="abc")


def test_a_library_of_another_patch_set_or_abi_is_to_be_built_again() -> None:
    assert library_problems(GOOD, "abc") == []
    assert library_problems(GOOD, "def") == [
        "the library was built from patch set abc, this package has def; run: instr build"
    ]
    message = f"has ABI {doctor.ABI + 1}, this package needs {doctor.ABI}; run: instr build"
    assert message in library_problems(replace(GOOD, abi=doctor.ABI + 1), "abc")[0]


@pytest.mark.parametrize(
    ("library", "cure"),
    [
        ("libvulkan.so.1", "apt install libvulkan1)"),
        ("libopenblas.so.0", "apt install libopenblas0)"),
        ("libcuda.so.1", "install NVIDIA's driver"),
        ("libother.so.1", "run: instr build"),
    ],
)
def test_a_backend_without_its_library_says_what_to_install(library: str, cure: str) -> None:
    """With the error of the dynamic linker."""
    error = f"OSError: {library}: cannot open shared object file: No such file or directory"
    (problem,) = library_problems(Library(error=error), "abc")
    assert problem.startswith(f"llama_cpp cannot be loaded: {error}; ")
    assert problem.endswith(cure)


def test_a_foreign_library_path_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/other")
    (problem,) = library_problems(Library(version="0.3.36", path="/other/libllama.so"), "abc")
    assert problem.endswith("unset LLAMA_CPP_LIB_PATH")


def test_what_is_missing_is_named_with_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.NEEDS, "no_such_module", ("instr nothing",))
    found = doctor.diagnose()
    assert found.missing == {"no_such_module": ["instr nothing"]}
    assert "missing: no_such_module; run: pip install llamacpp-instr" in found.problems


def test_an_extra_that_is_missing_is_named_and_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"view": EXTRAS["view"]})
    monkeypatch.setitem(sys.modules, "viztracer", None)
    assert doctor.diagnose().extras == {"view": "instr view"}
    result = CliRunner().invoke(cli.main, ["doctor"])
    line = 'extra view      missing, for instr view: pip install "llamacpp-instr[view]"'
    assert line in result.output.splitlines()
    assert "problem: missing" not in result.output
