"""What commands need from the system: packages, directories and Python processes.

Invariant: every extra that a command needs is in the table of extras, with its modules, and
pyproject.toml has the same names. A missing one is named in the same words everywhere.

`python -c` and `python -m` look for modules in the working directory first, so a `json.py` there
would run. A child therefore sets `sys.path` to that of this process before it imports anything.

A child process owns a temporary directory. It waits for the end of a pipe that this process holds
open, and then removes the directory. This also works after SIGTERM, SIGKILL or an abort of ggml,
where this process has no chance to clean up.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from llamacpp_instr.base.errors import UsageError


def cache_dir() -> Path:
    """The directory for what can be made again: LLAMACPP_INSTR_CACHE, or in the user's cache."""
    if own := os.environ.get("LLAMACPP_INSTR_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "llamacpp-instr"


def python(code: str, *arguments: str) -> list[str]:
    """The command line that runs `code` in Python with `arguments`."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}", *arguments]


def pip(*arguments: str) -> list[str]:
    """The command line of this environment's pip."""
    run = "import runpy; runpy.run_module('pip', run_name='__main__', alter_sys=True)"
    return python(run, *arguments)


_OWNER = """
import os, shutil, signal, sys, time
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    if hasattr(signal, name):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
print(flush=True)
sys.stdin.read()
for _ in range(100):  # a process that still writes there may need a moment to end
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""


@contextlib.contextmanager
def temporary_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new directory in `parent`, by default in `place()`. It is removed when the block or this
    process ends. Raises `OSError` if the directory cannot be created."""
    path = (parent or place()).absolute() / f"{prefix}{os.urandom(8).hex()}"
    with start_owner(path):
        path.mkdir(0o700)
        yield path


def place() -> Path:
    """Where temporary files go. Not found by `tempfile`, whose trial file an interruption would
    leave behind. Raises `UsageError` if no such directory is writable."""
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    for name in (*named, "/tmp", "/var/tmp", "."):
        if name and Path(name).is_dir() and os.access(name, os.W_OK | os.X_OK):
            return Path(name)
    raise UsageError("no directory for temporary files is writable; set TMPDIR")


def start_owner(path: Path) -> subprocess.Popen[bytes]:
    """A process that removes the directory `path` (absolute) when its standard input ends: at the
    end of the process's context manager, or at the end of this process."""
    owner = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _OWNER, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=path.anchor,  # otherwise the caller's directory could not be unmounted
        start_new_session=True,  # Ctrl-C is for this process
    )
    assert owner.stdout
    owner.stdout.readline()  # from now on it ignores every signal but SIGKILL
    return owner


EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dask": ("instr collect --dask", ("distributed",)),
    "fleet": ("instr collect, instr sql", ("duckdb", "fsspec", "pyarrow")),
    "hf": (
        "instr import, instr validate --reference",
        ("torch", "transformers", "safetensors", "sentencepiece"),
    ),
    "live": (
        "instr live and the pages of weights and debug",
        ("starlette", "uvicorn", "websockets", "prometheus_client"),
    ),
    "onnx": ("instr to-onnx, instr validate", ("onnx", "onnxruntime")),
    "otlp": (
        "instr to-otlp, instr live --otlp",
        ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    ),
    "parquet": ("instr to-parquet without --csv", ("pyarrow",)),
    "predict": ("the costs of kernels in instr probe, for instr predict", ("scipy",)),
    "report": ("charts in reports and notebooks", ("matplotlib",)),
    "schedule": ("instr schedule --policy optimal, instr recipe with a bound", ("ortools",)),
    "tensors": ("values as safetensors, instr to-flashinfer", ("safetensors",)),
    "torch": ("instr to-torch", ("tensorboardX",)),
    "tui": ("instr live --tui", ("textual",)),
    "view": ("instr view", ("viztracer", "starlette", "uvicorn")),
}
"""extra -> what needs it, and the modules that it installs"""


def is_installed(module: str) -> bool:
    """Whether a module can be found. It is not imported, but the packages that contain it are."""
    if module in sys.modules:
        return sys.modules[module] is not None
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package that would contain it
        return False


def missing_modules(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [module for module in EXTRAS[extra][1] if not is_installed(module)]


def how_to_install(extra: str) -> str:
    """The command that installs an extra."""
    return f'pip install "llamacpp-instr[{extra}]"'


def need(extra: str, *modules: str, hint: str = "") -> None:
    """Raises UsageError, which says how to install the extra, if one of `modules`, by default all
    of the extra's, is missing. `hint` names another way."""
    missing = [name for name in missing_modules(extra) if name in (modules or EXTRAS[extra][1])]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        cure = ", ".join(filter(None, (how_to_install(extra), hint)))
        raise UsageError(f"{', '.join(missing)} {are} not installed: {cure}")
