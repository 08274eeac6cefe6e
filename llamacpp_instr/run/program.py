"""Finds which llama_cpp a command's own Python would load, without running any of its code."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from llamacpp_instr.base.errors import NativeError

# Run by the command's interpreter; its arguments are the first entries of the search path. The
# working directory is removed before any import, so that no module there runs.
_PROBE = """
import sys
if sys.path[0] == "":
    del sys.path[0]
import importlib.util, os, pathlib
if not getattr(sys.flags, "safe_path", sys.flags.isolated):
    sys.path[:0] = sys.argv[1:]
spec = importlib.util.find_spec("llama_cpp")
if spec and spec.origin:
    print(os.environ.get("LLAMA_CPP_LIB_PATH") or pathlib.Path(spec.origin).parent / "lib")
"""


def check_library(program: str, arguments: Sequence[str]) -> None:
    """Raise `NativeError` if `program` is a Python that would load an unpatched library."""
    path = Path(program)
    if re.fullmatch(r"python[\d.]*", path.name):
        interpreter, (options, first) = program, _search_path(arguments)
    else:
        named = _named_interpreter(path)
        if named is None:
            return
        interpreter, (options, first) = named, _search_path([program])
    try:
        probe = subprocess.run(
            [interpreter, *options, "-c", _PROBE, first],
            capture_output=True, text=True, errors="surrogateescape", timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return
    for library in Path(probe.stdout.strip()).glob("libllama.*") if probe.stdout.strip() else ():
        if not is_instrumented(library):
            raise NativeError(
                f"the llama-cpp-python that {interpreter} loads is not the patched one "
                f"({library}); run `instr build` in its environment"
            )
        return


def is_instrumented(library: Path) -> bool:
    """Whether a libllama is the patched one, or has gone."""
    return not library.is_file() or b"llama_instr_abi" in library.read_bytes()


def _search_path(arguments: Sequence[str]) -> tuple[list[str], str]:
    """From a Python's arguments: the options that change the module search path, and the directory
    of the program, which comes first in it (empty for the working directory)."""
    options: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            script = Path(argument).resolve()
            first = "" if argument == "-" else str(script if script.is_dir() else script.parent)
            return options, first
        if argument == "--check-hash-based-pycs":
            next(rest, None)
        for at, letter in enumerate("" if argument.startswith("--") else argument, start=1):
            if letter in "cm":
                return options, ""
            if letter in "WX":
                if at == len(argument):
                    next(rest, None)  # its value
                break
            if letter in "IEsSP":
                options.append(f"-{letter}")
    return options, ""


def _named_interpreter(program: Path) -> str | None:
    """The Python interpreter in a script's first line, or None."""
    with program.open("rb") as file:
        first = file.readline(512).decode(errors="replace")
    match = re.match(r"#!\s*(?:/usr/bin/env\s+)?(\S*python[\d.]*)\s*$", first)
    return shutil.which(match[1]) if match else None
