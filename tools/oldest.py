"""Prints the oldest versions that pyproject.toml allows, as constraints for pip.

Invariant: only pyproject.toml contains the bounds.

    python -m tools.oldest > constraints.txt
"""

from __future__ import annotations

import re
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

# Python 3.10 has no TOML reader; this needs only the lists of quoted requirements
_LIST = re.compile(r"^(?P<name>[\w-]+) = \[(?P<items>.*?)\]$", re.MULTILINE | re.DOTALL)
_REQUIREMENT = re.compile(r'"(?P<name>[\w.-]+)(?P<bound>[^";]*)(;[^"]*)?"')


def load_bounds(path: Path = PYPROJECT) -> dict[str, str]:
    """The lower bounds, by name, of the dependencies and of the extras except `native`, whose
    version is exact, of `hf` and `peers`, which the suite does without, and of `test` and `dev`.

    Raises ValueError for a requirement without a bound of the form `>=VERSION`.
    """
    project = path.read_text(encoding="utf-8").partition("[project]")[2].partition("\n[tool.")[0]
    bounds = {}
    for items in _LIST.finditer(re.sub(r"#.*", "", project)):
        if items["name"] in ("classifiers", "dev", "hf", "keywords", "native", "peers", "test"):
            continue
        for found in _REQUIREMENT.finditer(items["items"].replace("\n", " ")):
            bound = re.fullmatch(r">=([\d.]+)", found["bound"])
            if bound is None:
                raise ValueError(f"{path}: {found['name']} has no lower bound")
            bounds[found["name"]] = bound[1]
    return bounds


def main() -> None:
    for name, bound in load_bounds().items():
        print(f"{name}=={bound}")


if __name__ == "__main__":
    main()
