"""The text that `quality` and `diverge` compute, from a file or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from llamacpp_instr.errors import UsageError


def read_text(name: str) -> str:
    """The text of a file without the newline at its end, as llama-perplexity reads it; `-` is
    standard input. Raises `UsageError` for one that cannot be read."""
    source = "standard input" if name == "-" else name
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return data.decode().removesuffix("\n")
    except OSError as error:
        raise UsageError(f"the text {source} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{source} is not UTF-8: byte {error.start} is wrong") from None
