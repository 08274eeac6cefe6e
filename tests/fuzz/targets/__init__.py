"""What is fuzzed: a surface is a function of the module that is named after its kind of corpus.

It does with a file what the commands do, and raises the same errors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

_OF_LOGS = (
    "log_reader", "cat", "perfetto", "chrome", "torch", "otlp", "flashinfer", "fleet", "graphs",
    "tables", "reports", "diff", "compression", "comparison",
)  # fmt: skip
_OF_MODELS = ("gguf_header", "inspection", "blocks", "model_report", "weights")

SURFACES = {
    **dict.fromkeys(_OF_LOGS, "log"),
    **dict.fromkeys(_OF_MODELS, "gguf"),
    "imatrix": "imatrix",
    "debug_protocol": "dap",
}
"""name of a surface -> its kind"""


def attempt_of(surface: str) -> Callable[[Path], None]:
    module = importlib.import_module(f"tests.fuzz.targets.{SURFACES[surface]}")
    attempt: Callable[[Path], None] = getattr(module, surface)
    return attempt
