"""Text that a program puts into its log: whatever is written, the strict reader reads.

So it is JSON in valid UTF-8, its numbers are finite, and no line is longer than the reader takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import msgspec

from llamacpp_instr.errors import UsageError
from llamacpp_instr.schema import MAX_LINE

# together less than a line: a note has a name and data, `session_start` the arguments and the host
MAX_DATA, MAX_NAME = MAX_LINE // 2, MAX_LINE // 4
MAX_DEPTH = 100
"""of lists and objects in each other; readers of JSON have a limit, and not all the same"""

_SURROGATES = re.compile("[\udc80-\udcff]+|[\ud800-\udfff]")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def log_json(what: str, data: Any, default: Callable[[Any], Any] | None = None) -> str:
    """`data` as JSON for a log; raises `UsageError`, which begins with `what`, where that is
    impossible. `default` makes JSON values of other objects. Bytes that are not UTF-8, as in the
    names of files, are written out: `\\xff`."""
    try:
        text = json.dumps(data, allow_nan=False, ensure_ascii=False, default=default)
        text = json.dumps(json.loads(_SURROGATES.sub(_escaped, text)))
        if len(text) <= MAX_DATA:
            msgspec.json.decode(text)  # has limits of its own, for integers
    except (TypeError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{what} cannot be written as JSON: {reason}") from None
    if len(text) > MAX_DATA:
        raise UsageError(f"{what} has {len(text)} bytes as JSON; a log takes {MAX_DATA}")
    brackets = re.sub(r"[^][{}]", "", _STRING.sub("", text))
    depth = max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)
    if depth > MAX_DEPTH:
        raise UsageError(f"{what} is nested {depth} levels deep; a log takes {MAX_DEPTH}")
    return text


def log_name(what: str, name: str) -> str:
    """A name for a log: as it is, but surrogates and NUL are written out. Raises `UsageError`,
    which begins with `what`, when it is too long."""
    name = _SURROGATES.sub(_written_out, name).replace("\0", "\\x00")
    size = len(json.dumps(name))
    if size > MAX_NAME:
        raise UsageError(f"{what} has {size} bytes as JSON; a log takes {MAX_NAME}")
    return name


def _written_out(found: re.Match[str]) -> str:
    if not "\udc80" <= found[0][0] <= "\udcff":
        return ascii(found[0])[1:-1]
    # bytes that Python could not decode; those of another encoding's locale may be UTF-8
    return found[0].encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _escaped(found: re.Match[str]) -> str:
    return _written_out(found).replace("\\", "\\\\")
