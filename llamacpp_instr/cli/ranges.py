"""What several commands read from their options: ranges of steps and layers, sizes, limits."""

from __future__ import annotations

import re

import click

from llamacpp_instr.errors import UsageError

LAST = 2**63
MOST_TOKENS = 1 << 16
"""what an option may ask for, where memory or time grow with it and nothing else limits it"""
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


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


def bytes_of_size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """Bytes of a size such as 500MB, for an option; at least 1MB."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,19})\s*(|KB|MB|GB|TB)", value.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a size; write it like 500MB or 2GB")
    n_bytes = int(match[1]) * _UNITS.get(match[2].upper(), 1)
    # every part of a rotated log repeats the models and the graphs, which would fill smaller parts
    if not 10**6 <= n_bytes < 2**63:
        raise click.BadParameter(f"{value!r} is not between 1MB and 9000000TB")
    return n_bytes
