"""The environment of the tests and of what they start: the same for every user and terminal."""

from __future__ import annotations

import os
import re
import time
from collections.abc import MutableMapping

FIXED = {
    "COLUMNS": "80",  # what pages show, and what must fit there
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    # the clone may belong to another user
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "LANG": "C.UTF-8",
    "MATPLOTLIBRC": os.devnull,
    "TERM": "xterm-256color",
    "TZ": "UTC",
}
REMOVED = re.compile(
    # colors and sizes
    r"NO_COLOR|(FORCE|CLICOLOR)\w*|COLORTERM|LINES|TTY_\w+|PY_COLORS"
    # the language of messages, and programs that a user prefers
    r"|LANGUAGE|LC_\w+|BROWSER|EDITOR|VISUAL|PAGER"
    # settings of what the product uses or is
    r"|(LLAMA_INSTR|OTEL|GIT|DASK|DUCKDB|MPL|GGML|OMP_(?!WAIT_POLICY))\w*"
    r"|PYTHON(HASHSEED|WARNINGS|OPTIMIZE|DEVMODE|UTF8|IOENCODING|UNBUFFERED|INSPECT|STARTUP)"
)
LOCAL = ("127.0.0.1", "localhost")


def fix_environment(environment: MutableMapping[str, str]) -> None:
    """Changes what a test or a program that it starts could notice of the user, the terminal or the
    place. Where caches are, which compiler and which index of packages remain the user's."""
    for name in [name for name in environment if REMOVED.fullmatch(name)]:
        del environment[name]
    environment.update(FIXED)
    # a proxy does not reach the servers of the tests
    for name in ("no_proxy", "NO_PROXY"):
        others = [host for host in environment.get(name, "").split(",") if host]
        environment[name] = ",".join(dict.fromkeys([*others, *LOCAL]))


def fix_this_process() -> None:
    """The same for this process, whose new files only others may not write."""
    fix_environment(os.environ)
    time.tzset()
    os.umask(0o022)
