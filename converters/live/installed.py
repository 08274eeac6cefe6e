"""Checks that the packages of a live view are installed, without importing them."""

from __future__ import annotations

import importlib.util
from typing import Literal

from llamacpp_instr.errors import UsageError

NEEDED = {
    "live": ("starlette", "uvicorn", "websockets", "prometheus_client"),
    "tui": ("textual",),
}
"""by the extra that installs them"""


def check_installed(extra: Literal["live", "tui"]) -> None:
    """Raises UsageError, which names what to install, if a part of the page (`live`) or of the
    terminal view is missing."""
    missing = [name for name in NEEDED[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f'{missing[0]} is not installed: pip install "llamacpp-instr[{extra}]"')
