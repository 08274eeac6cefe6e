"""Starts Python in a child process that imports from the same places as this process.

`python -c` and `python -m` look for modules in the working directory first, so a `json.py` there
would run. The child sets `sys.path` to that of this process before it imports anything.
"""

from __future__ import annotations

import sys


def python(code: str, *arguments: str) -> list[str]:
    """The command line that runs `code` in Python with `arguments`."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}", *arguments]


def pip(*arguments: str) -> list[str]:
    """The command line of this environment's pip."""
    run = "import runpy; runpy.run_module('pip', run_name='__main__', alter_sys=True)"
    return python(run, *arguments)
