"""Text of a program in its log, in a form that the strict reader accepts.

It is JSON in valid UTF-8 with finite numbers, and no line is longer than the reader accepts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import msgspec

from llamacpp_instr.base.errors import UsageError, reason
from llamacpp_instr.log.schema import MAX_LINE

# together less than a line: a note has a name and data, `session_start` the arguments and the host
MAX_DATA, MAX_NAME = MAX_LINE // 2, MAX_LINE // 4
MAX_DEPTH = 100
"""of nested lists and objects; readers of JSON have various limits"""

_SURROGATES = re.compile("[\udc80-\udcff]+|[\ud800-\udfff]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def log_json(what: str, data: Any, default: Callable[[Any], Any] | None = None) -> str:
    """`data` as JSON for a log. `default` converts other objects to JSON values. Bytes that are
    not UTF-8, as in file names, are escaped as `\\xff`. Raises `UsageError`, which begins with
    `what`, if `data` cannot be written."""
    try:
        text = json.dumps(data, allow_nan=False, ensure_ascii=False, default=default)
        text = json.dumps(json.loads(_SURROGATES.sub(_escaped, text)))
        if len(text) <= MAX_DATA:
            msgspec.json.decode(text)  # has its own limits for integers
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} cannot be written as JSON: {reason(error)}") from None
    if len(text) > MAX_DATA:
        raise UsageError(f"{what} has {len(text)} bytes as JSON; a log allows {MAX_DATA}")
    brackets = re.sub(r"[^][{}]", "", _STRING.sub("", text))
    depth = max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)
    if depth > MAX_DEPTH:
        raise UsageError(f"{what} is nested {depth} levels deep; a log allows {MAX_DEPTH}")
    return text


def log_name(what: str, name: str) -> str:
    """A name for a log, with surrogates and NUL escaped. Raises `UsageError`, which begins with
    `what`, if it is too long."""
    name = _SURROGATES.sub(_written_out, name).replace("\0", "\\x00")
    size = len(json.dumps(name))
    if size > MAX_NAME:
        raise UsageError(f"{what} has {size} bytes as JSON; a log allows {MAX_NAME}")
    return name


def _written_out(found: re.Match[str]) -> str:
    if not "\udc80" <= found[0][0] <= "\udcff":
        return ascii(found[0])[1:-1]
    # bytes that Python could not decode; if the locale's encoding is another one, they may be UTF-8
    return found[0].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _escaped(found: re.Match[str]) -> str:
    return _written_out(found).replace("\\", "\\\\")
