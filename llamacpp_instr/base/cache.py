"""Where files are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The directory of sdists, wheels, imported models and logs: LLAMACPP_INSTR_CACHE, or in the
    user's cache."""
    own = os.environ.get("LLAMACPP_INSTR_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "llamacpp-instr"
