"""Prints text of models, logs and file names so that none of it steers a terminal.

Invariant: what is printed to a terminal holds no control character but the newlines and tabs of a
text, so it can neither start an escape sequence nor turn the direction of what is beside it.
"""

from __future__ import annotations

import io
import os
import re
import sys
from typing import BinaryIO


def printable(text: str) -> str:
    """The text as a part of one line: its control characters are written out, as `\\x1b`."""
    return _UNPRINTABLE.sub(_written_out, text)


def printable_text(text: str) -> str:
    """The same for text of several lines: newlines and tabs stay what they are."""
    return _UNPRINTABLE_IN_TEXT.sub(_written_out, text)


def write_text(out: BinaryIO, text: str) -> None:
    """Write text at once. A terminal gets it printable; a pipe or a file gets it as it is, since
    who reads it there wants what was written, as of any other program."""
    out.write((printable_text(text) if out.isatty() else text).encode(errors="surrogateescape"))
    out.flush()


def print_line(line: object) -> None:
    """Print to standard output what holds a file's name, which a script may want: as `write_text`,
    with the bytes of a name that is not UTF-8. A reader that has closed the pipe is no error."""
    try:
        sys.stdout.flush()
        write_text(sys.stdout.buffer, f"{line}\n")
    except BrokenPipeError:
        abandon_standard_output()


def abandon_standard_output() -> None:
    """From now on what is printed goes nowhere; else the interpreter writes what is left of it at
    exit, and complains."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def render_json(value: object) -> str:
    """JSON in lines, for a script or a terminal."""
    import json

    # of what steers a terminal, ASCII's JSON lets this one stand
    return json.dumps(value, indent=2).replace("\x7f", "\\u007f") + "\n"


MOST = 1000
"""characters of a line that quotes what is in a file"""


def shortened(line: str) -> str:
    """The line, without its middle if it is longer than MOST: what it quotes may be megabytes."""
    return line if len(line) <= MOST else f"{line[: MOST * 2 // 3]}…{line[-MOST // 3 :]}"


def notice(line: str) -> None:
    """Print a line to standard error, printable wherever that goes, and not too long."""
    print(printable(shortened(line)), file=sys.stderr, flush=True)


def replace_what_cannot_be_shown() -> None:
    """From now on a character that standard output's encoding lacks is printed as `?`."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def _written_out(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]


# C0, DEL, C1; marks and overrides of direction; what breaks a line; what is no character
_STEERING = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff"
_UNPRINTABLE = re.compile(f"[\x00-\x1f{_STEERING}]")
_UNPRINTABLE_IN_TEXT = re.compile(f"[\x00-\x08\x0b-\x1f{_STEERING}]")
