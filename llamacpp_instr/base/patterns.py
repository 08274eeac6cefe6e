"""Checks regular expressions for the library, which compiles them as `std::regex`."""

from __future__ import annotations

import re

from llamacpp_instr.base.errors import UsageError

MAX_PATTERN = 1000
"""characters. `std::regex` and Python's `re` handle parentheses by recursion: thousands of them
overflow the stack"""
MAX_NESTING = 100


def check_pattern(option: str, pattern: str) -> None:
    """Raises UsageError, naming the option, for a pattern that is too long, too deeply nested or
    not UTF-8. The library checks the rest: its syntax is ECMAScript's."""
    if len(pattern) > MAX_PATTERN:
        raise UsageError(
            f"{option}: the pattern has {len(pattern):,} characters, more than {MAX_PATTERN:,}"
        )
    if "\0" in pattern or re.search("[\ud800-\udfff]", pattern):
        raise UsageError(f"{option}: the pattern contains a NUL or bytes that are not UTF-8")
    depth = deepest = 0
    for bracket in re.findall(r"[()]", pattern):
        depth += 1 if bracket == "(" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise UsageError(
            f"{option}: the pattern nests {deepest} parentheses, more than {MAX_NESTING}"
        )
