"""The packages of the extra `hf`, which importing needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from llamacpp_instr.errors import UsageError

LIBRARIES = ("torch", "transformers", "safetensors", "sentencepiece")


def check_libraries(names: Sequence[str] = LIBRARIES) -> None:
    """Raises UsageError if one of the packages is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"this needs the package{'s' * (len(missing) > 1)} {', '.join(missing)}: "
            'pip install "llamacpp-instr[hf]"'
        )
