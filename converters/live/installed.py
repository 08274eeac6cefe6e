"""Whether what the page of a live session needs is installed. It imports none of it."""

from __future__ import annotations

import importlib.util

from llamacpp_instr.errors import UsageError

NEEDED = ("starlette", "uvicorn", "websockets", "prometheus_client")


def check_installed() -> None:
    """Raises UsageError, which names what to install, if a part is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f'{missing[0]} is not installed: pip install "llamacpp-instr[live]"')
