"""The packages that pip installs only with an extra.

Invariant: every extra that a command needs is in this table, with its modules, and pyproject.toml
has the same names. A missing one is named in the same words everywhere.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from llamacpp_instr.base.errors import UsageError

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
    "parquet": ("instr to-parquet without --csv", ("pyarrow",)),
    "predict": ("the costs of kernels in instr probe, for instr predict", ("scipy",)),
    "report": ("charts in reports and notebooks", ("matplotlib",)),
    "schedule": ("instr schedule --policy optimal", ("ortools",)),
    "tensors": ("values as safetensors, instr to-flashinfer", ("safetensors",)),
    "torch": ("instr to-torch", ("tensorboardX",)),
    "tui": ("instr live --tui", ("textual",)),
    "view": ("instr view", ("viztracer", "starlette", "uvicorn")),
}
"""extra -> what needs it, and the modules that it installs"""


def is_installed(module: str) -> bool:
    """Whether a top-level module can be found; it is not imported."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None


def missing_modules(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [module for module in EXTRAS[extra][1] if not is_installed(module)]


def how_to_install(extra: str) -> str:
    """The command that installs an extra."""
    return f'pip install "llamacpp-instr[{extra}]"'


def need(extra: str, *modules: str, hint: str = "") -> None:
    """Raises UsageError, with the command that installs it, if one of the modules is missing; by
    default those of the whole extra. `hint` names another way."""
    missing = [name for name in missing_modules(extra) if name in (modules or EXTRAS[extra][1])]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        cure = ", ".join(filter(None, (how_to_install(extra), hint)))
        raise UsageError(f"{', '.join(missing)} {are} not installed: {cure}")
