"""Finds out what is installed and what is missing, and never fails itself.

llama_cpp is loaded in a child process. So a library that crashes when it is loaded (built for
another CPU, with a part missing) is a finding and does not end the diagnosis.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from llamacpp_instr import __version__
from llamacpp_instr.base.cpus import cpu_name
from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.base.machine import untested, usable_cpus
from llamacpp_instr.base.system import EXTRAS, is_installed, missing_modules, python
from llamacpp_instr.llama.build import missing_library
from llamacpp_instr.llama.build.programs import installed_programs
from llamacpp_instr.llama.build.source_tree import patch_digest, patches_dir, read_upstream
from llamacpp_instr.llama.build.wheel import compilers
from llamacpp_instr.llama.native import ABI

PROBE_SECONDS = 60

# The last line that it prints is the answer; llama.cpp may print lines before it.
_PROBE = """
import ctypes, json
import llama_cpp
from llama_cpp import llama_cpp as low
answer = {"version": llama_cpp.__version__, "path": low._lib._name}
answer["features"] = llama_cpp.llama_print_system_info().decode("utf-8", "replace")
try:
    info = low._lib.llama_instr_info
    info.restype = ctypes.c_char_p
    found = json.loads(info())
    answer |= {key: found.get(key, "") for key in ("patches", "commit")}
    answer["abi"] = low._lib.llama_instr_abi()
except AttributeError:
    pass
if "abi" in answer:
    from llamacpp_instr.llama.devices import devices
    answer["devices"] = [device.as_dict() for device in devices()]
print("\\n" + json.dumps(answer))
"""

# Dependencies of the package: if one is missing, the installation is damaged.
NEEDS: dict[str, tuple[str, ...]] = {
    "click": ("every command",),
    "msgspec": ("every command that reads or writes a log",),
    "orjson": ("instr to-perfetto --format json",),
    "numpy": ("summaries, comparisons, conversions and everything about weights",),
    "pandas": ("instr to-parquet", "llamacpp_instr.converters.exports.tables"),
    "perfetto": ("instr to-perfetto", "instr view"),
    "gguf": ("weights of a quantized model, without the patched library",),
    "zstandard": ("logs that end in .zst",),
    "rich": ("tables in the terminal",),
}


@dataclass
class Library:
    """What was found out about llama_cpp; `error` is empty if it could be loaded."""

    error: str = ""
    version: str = ""
    path: str = ""
    features: list[str] = field(default_factory=list)
    """instruction sets and switches of the loaded ggml, as llama.cpp prints them"""
    abi: int | None = None
    """None if it is not the patched library"""
    patches: str = ""
    commit: str = ""
    devices: list[dict[str, Any]] = field(default_factory=list)
    """what ggml reports about each, and what a log records of its work"""


@dataclass
class Diagnosis:
    """The findings of `instr doctor`."""

    package: str
    python: str
    prefix: str
    upstream: str
    """the version that `instr build` installs"""
    patches: str
    """digest of this package's patch set"""
    library: Library
    programs: list[str]
    """llama.cpp's programs in this environment that have this package's recorder"""
    cpu: str
    cpus: int
    """logical processors that this process may use"""
    compiler: str
    """path of the C++ compiler; empty if none was found"""
    missing: dict[str, list[str]]
    """module -> what it is needed for"""
    extras: dict[str, str]
    """extra that is not completely installed -> what needs it"""
    untested: str
    """what was never tested on a machine like this one"""
    problems: list[str]
    """one line each, ending with what to do; empty if recording works"""

    @property
    def ok(self) -> bool:
        """Whether recording works."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as the JSON object of `--json`."""
        return {"ok": self.ok, **asdict(self)}


def diagnose() -> Diagnosis:
    """Examine the package, the library, the machine and the modules."""
    problems: list[str] = []
    version = digest = ""
    try:
        patches = patches_dir()
        version, digest = read_upstream(patches).wheel_version, patch_digest(patches)
    except (InstrError, OSError) as error:
        problems.append(str(error))
    library = probe_library()
    problems += library_problems(library, digest)
    missing = {name: list(uses) for name, uses in NEEDS.items() if not is_installed(name)}
    if missing:
        problems.append(f"missing: {', '.join(missing)}; run: pip install llamacpp-instr")
    return Diagnosis(
        package=__version__,
        python=f"{platform.python_version()} ({sys.executable})",
        prefix=sys.prefix,
        upstream=version,
        patches=digest,
        library=library,
        programs=installed_programs(digest),
        cpu=cpu_name() or platform.machine(),
        cpus=usable_cpus(),
        compiler=compilers()[1] or "",
        missing=missing,
        extras={extra: use for extra, (use, _) in EXTRAS.items() if missing_modules(extra)},
        untested=untested(),
        problems=problems,
    )


def probe_library() -> Library:
    """Load llama_cpp in a child process and examine it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_INSTR_")}
    try:
        asked = subprocess.run(
            python(_PROBE),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Library(error=f"loading it takes more than {PROBE_SECONDS} s")
    if asked.returncode < 0:
        name = signal.Signals(-asked.returncode).name
        why = " (it was built for another CPU)" if name == "SIGILL" else ""
        return Library(error=f"loading it ends with {name}{why}")
    if asked.returncode != 0:
        return Library(error=(asked.stderr.strip().splitlines() or ["it prints nothing"])[-1])
    answer = json.loads(asked.stdout.splitlines()[-1])
    parts = [part.strip() for part in answer.pop("features").split("|")]
    return Library(features=[part for part in parts if part], **answer)


def library_problems(library: Library, digest: str) -> list[str]:
    """The problems of the library that prevent recording; `digest` is this package's patch set."""
    if library.error.endswith("No module named 'llama_cpp'"):
        return ["llama_cpp is not installed; run: instr build"]
    where, cure = f"{library.path} (llama-cpp-python {library.version})", "run: instr build"
    if library.error:
        problem = f"llama_cpp cannot be loaded: {library.error}"
        cure = missing_library(library.error) or cure
    elif library.abi is None:
        problem = f"{where} is not the instrumented library"
        if os.environ.get("LLAMA_CPP_LIB_PATH"):
            cure = "unset LLAMA_CPP_LIB_PATH"
    elif library.abi != ABI:
        problem = f"the library has ABI {library.abi}, this package needs {ABI}"
    elif library.patches != digest:
        built = library.patches
        problem = f"the library was built from patch set {built}, this package has {digest}"
    else:
        return []
    return [f"{problem}; {cure}"]
