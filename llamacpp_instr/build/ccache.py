"""What ccache needs to know so that objects of one build serve another.

ggml compiles with ccache if it is installed. ccache takes `-march=native` for an option like any
other, so a cache that has moved to another CPU would return objects that were compiled for the
first one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path


def ccache_environment(work: Path, cpu: Sequence[str] | None) -> dict[str, str]:
    """Variables for a build below `work`: paths of a new tree cause no misses. With `cpu`, the
    identity of the CPU that objects are compiled for, only those for the same one are found. Writes
    it to a file in `work`."""
    found = {"CCACHE_BASEDIR": str(work), "CCACHE_NOHASHDIR": "1"}
    if cpu is not None:
        file = work / "cpu.json"
        file.write_text(json.dumps(cpu), encoding="utf-8")
        named = os.environ.get("CCACHE_EXTRAFILES")
        found["CCACHE_EXTRAFILES"] = os.pathsep.join(filter(None, (named, str(file))))
    return found
