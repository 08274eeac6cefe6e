"""Starts Python in a process of its own that imports what this process imports.

`python -c` and `python -m` look for modules in the working directory first: a `json.py` there would
run. A child gets this process's own `sys.path` before it imports anything.
"""

from __future__ import annotations

import sys


def python(code: str, *arguments: str) -> list[str]:
    """The command line of a Python that runs `code` with `arguments`."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}", *arguments]


def pip(*arguments: str) -> list[str]:
    """The command line of this environment's pip."""
    run = "import runpy; runpy.run_module('pip', run_name='__main__', alter_sys=True)"
    return python(run, *arguments)
