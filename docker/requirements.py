"""Prints the requirements of a pyproject.toml with some extras, one per line.

They are installed before the package is copied, so that a change of the package keeps their layer.

    requirements.py pyproject.toml [EXTRA...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib


def main(pyproject: str, *extras: str) -> None:
    project = tomllib.loads(Path(pyproject).read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    for requirement in project["dependencies"]:
        print(requirement)
    for extra in extras:
        if extra not in optional:
            sys.exit(f"no extra {extra!r}; there are {', '.join(optional)}")
        for requirement in optional[extra]:
            print(requirement)


main(*sys.argv[1:])
