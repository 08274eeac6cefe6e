"""Patterns that choose names: globs, or regular expressions after `re:`.

The expressions made here mean the same to Python's `re` as to the `std::regex` of the recorder and
the quantizer.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import accumulate

from llamacpp_instr.base.errors import UsageError

MAX_PATTERN = 1000
"""characters. Both libraries handle parentheses by recursion: thousands overflow the stack"""
MAX_NESTING = 100
_FORMER = re.compile(r"[\\^$|()+]|^\.\*|^[^*?[]*$")
"""a pattern of --stats or --tensor-type from before globs: a regular expression"""


def name_matches(name: str, pattern: str) -> bool:
    """Whether a whole name matches a glob: `*` is any text, `?` any character, `[0-3]` one of
    several and `[!0-3]` none of them. After `re:`, whether a regular expression is found in it.

    Raises `UsageError` for an expression that is not valid.
    """
    return _compiled(pattern).search(name) is not None


def regular_expression(option: str, pattern: str) -> str:
    """A pattern as a regular expression in the syntax of ECMAScript, for `std::regex_search`.

    As in earlier versions, a pattern without wildcards, or with characters that only regular
    expressions use, is one already. Raises `UsageError` like `check_pattern`. The library checks
    the rest.
    """
    former = not pattern.startswith("re:") and _FORMER.search(pattern)
    check_pattern(option, pattern)
    return pattern if former else _expression(pattern)


def check_pattern(option: str, pattern: str) -> None:
    """Raises UsageError for a pattern that is too long, too deeply nested or not UTF-8."""
    if len(pattern) > MAX_PATTERN:
        raise UsageError(
            f"{option}: the pattern has {len(pattern):,} characters, more than {MAX_PATTERN:,}"
        )
    if "\0" in pattern or re.search("[\ud800-\udfff]", pattern):
        raise UsageError(f"{option}: the pattern contains a NUL or bytes that are not UTF-8")
    steps = (1 if bracket == "(" else -1 for bracket in re.findall(r"[()]", pattern))
    deepest = max(accumulate(steps, initial=0))
    if deepest > MAX_NESTING:
        raise UsageError(
            f"{option}: the pattern nests {deepest} parentheses, more than {MAX_NESTING}"
        )


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    check_pattern("the pattern", pattern)
    try:
        return re.compile(_expression(pattern))
    except re.error as error:
        raise UsageError(f"{pattern!r} is not a regular expression: {error}") from None


def _expression(pattern: str) -> str:
    if pattern.startswith("re:"):
        return pattern.removeprefix("re:")
    pieces = re.sub(r"\[(!?)(\]?[^]!][^]]*|\][^]]*|!\]?[^]]+)\]|[\s\S]", _piece, pattern)
    return f"^{pieces}$"


def _piece(found: re.Match[str]) -> str:
    """A wildcard, a set or a character of a glob, as a part of a regular expression."""
    if found[2] is not None:
        inside = re.sub(r"[\\[\]^]", r"\\\g<0>", found[2])
        return f"[{'^' * bool(found[1])}{inside}]"
    wildcards = {"*": ".*", "?": "."}
    return wildcards.get(found[0]) or re.sub(r"[\\^$.|()+{}[\]]", r"\\\g<0>", found[0])
