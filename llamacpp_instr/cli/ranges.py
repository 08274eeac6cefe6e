"""Ranges of steps and layers, for every command that selects some, and the range of numbers."""

from __future__ import annotations

from llamacpp_instr.errors import UsageError

LAST = 2**63
MOST_TOKENS = 1 << 16
"""what an option may ask for, where memory or time grow with it and nothing else limits it"""


def parse_range(option: str, text: str | None, between: str = ":") -> tuple[int, int] | None:
    """(first, last) of `A`, `A:B`, `A:` or `:B`, both inclusive; None if `text` is None.

    `between` is the separator. Raises UsageError, which names `option`.
    """
    if text is None:
        return None
    first, several, last = text.partition(between)
    try:
        chosen = int(first or 0), int(last or LAST) if several else int(first)
    except ValueError:
        example = f"7, 7{between}9, 7{between} or {between}9"
        raise UsageError(f"{option} {text}: give {example}") from None
    if chosen[0] > chosen[1]:
        raise UsageError(f"{option} {text}: the first is greater than the last")
    return chosen
