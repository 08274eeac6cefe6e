"""Lists the installed versions with known vulnerabilities: `make audit`.

pip-audit looks them up package by package, and exits with status 0 even if it finds no data about a
package. Here missing data is a failure.

Invariant: exit status 0 means that every package was looked up and none is vulnerable.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from llamacpp_instr.llama.build.source_tree import patches_dir, read_upstream

OURS = "llamacpp-instr"


def installed_versions(root: str = OURS) -> dict[str, str]:
    """Name -> version of all installed requirements of `root` and its extras; and of the pinned
    llama-cpp-python by its own version, without the patches."""
    found: dict[str, str] = {}
    waiting = [root]
    while waiting:
        name = _normal(waiting.pop())
        if name in found:
            continue
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another system, or an extra that is not installed
        found[name] = distribution.version
        for requirement in distribution.requires or []:
            extra = "extra ==" in requirement
            if name == root or not extra:
                waiting.append(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
    found.pop(root, None)
    found["llama-cpp-python"] = read_upstream(patches_dir()).version
    return dict(sorted(found.items()))


def judge(versions: dict[str, str], answer: dict[str, Any]) -> list[str]:
    """The problems, one line each: packages that are vulnerable, and packages without data."""
    asked = {_normal(each["name"]): each for each in answer["dependencies"]}
    lines = [
        f"{name} {versions[name]}: {flaw['id']}, fixed in {', '.join(flaw['fix_versions']) or '?'}"
        for name, each in asked.items()
        for flaw in each.get("vulns", [])
    ]
    unknown = [name for name in versions if "vulns" not in asked.get(name, {})]
    if unknown:
        named = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        lines.append(
            f"no data about {len(unknown)} of {len(versions)} packages ({named}): "
            "they may be vulnerable"
        )
    return lines


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(arguments: Sequence[str]) -> int:
    """`python -m tools.audit PIP_AUDIT`: prints the problems; returns 1 if there are any."""
    versions = installed_versions()
    with tempfile.TemporaryDirectory() as directory:
        pinned = Path(directory) / "pinned.txt"
        pinned.write_text("".join(f"{name}=={of}\n" for name, of in versions.items()))
        ask = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "-f", "json"]
        done = subprocess.run(
            [arguments[0], *ask, "-r", str(pinned)], capture_output=True, text=True, check=False
        )
    try:
        lines = judge(versions, json.loads(done.stdout))
    except ValueError:
        why = (done.stderr.strip().splitlines() or ["pip-audit printed nothing"])[-1]
        lines = [f"no data about vulnerabilities: {why}"]
    print(*lines or [f"{len(versions)} packages, no known vulnerability"], sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
