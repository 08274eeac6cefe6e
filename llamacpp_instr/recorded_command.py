"""The command line as `instr exec` writes it into the log: without secrets, and not endless."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .log_text import log_json

MAX_BYTES = 16 << 10
"""of the text; it travels in the environment, where Linux takes 128 KiB a variable and counts the
variables together with the arguments"""

REDACTED = "[redacted]"
SECRET_NAMES = ("key", "token", "secret", "password", "passwd", "credential", "auth")
"""an option, a variable or a header whose name holds one of these has a secret value"""

_SECRET_NAME = re.compile("|".join(SECRET_NAMES), re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"\b(?:sk-|hf_|gh[a-z]_|github_pat_)[\w-]{8,}"  # OpenAI and those like it, Hugging Face, GitHub
    r"|(?<=://)[^\s/@:]*:[^\s/@]+(?=@)"  # user:password@ of a URL
)
_SCHEMES = ("bearer", "basic")


def recorded_command(command: Sequence[str], keep_secrets: bool) -> str:
    """JSON of the command for the log's `args`: as many arguments as fit, and how many do not."""
    arguments = list(command) if keep_secrets else redacted(command)
    count = size = 0
    for argument in arguments:
        size += len(log_json("the command", argument)) + 2
        if size > MAX_BYTES:
            break
        count += 1
    left_out = len(arguments) - count
    kept: dict[str, object] = {"command": arguments[:count]}
    return log_json("the command", kept | ({"arguments_left_out": left_out} if left_out else {}))


def redacted(arguments: Sequence[str]) -> list[str]:
    """The arguments with `[redacted]` for what looks like a secret: the VALUE in `--NAME VALUE`,
    `--NAME=VALUE`, `NAME=VALUE` and `NAME: VALUE` where NAME is that of a secret, also inside of an
    argument of several words; and keys of known services and passwords in URLs anywhere."""
    result: list[str] = []
    hide = False
    for argument in arguments:
        words = re.split(r"(\s+)", argument)
        if hide and not argument.startswith("-"):
            result.append(REDACTED)
            hide = argument.lower() in _SCHEMES
            continue
        if len(words) > 1:
            words[::2] = redacted(words[::2])
            result.append("".join(words))
            hide = False
            continue
        name, separator, value = (*re.split("([=:])", argument, maxsplit=1), "", "")[:3]
        secret = bool(_SECRET_NAME.search(name))
        if secret and value:
            result.append(f"{name}{separator}{REDACTED}")
            hide = value.lower() in _SCHEMES
        else:
            result.append(_SECRET_VALUE.sub(REDACTED, argument))
            hide = secret and (argument.startswith("-") or bool(separator))
    return result
