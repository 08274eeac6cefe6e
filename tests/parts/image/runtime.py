"""The engine's runtime: runc, plus the mounts of `Engine.access`.

    runtime.py MOUNTS.json RUNC'S-ARGUMENTS

This is the only way to give the steps of Docker's builder a mount without changing the Dockerfile.
Imports nothing of this package, because every start of a container waits for it.
"""

import json
import os
import sys
from pathlib import Path


def main() -> None:
    mounts, *arguments = sys.argv[1:]
    if "create" in arguments:
        bundle = Path(arguments[arguments.index("--bundle") + 1])
        add(bundle / "config.json", json.loads(Path(mounts).read_text()))
    os.execvp("runc", ["runc", *arguments])


def add(path: Path, mounts: "list[list[str]]") -> None:
    """Add these mounts in order: `[source, target]` or `[source, target, "ro"]`."""
    config = json.loads(path.read_text())
    for source, target, *mode in mounts:
        config["mounts"].append(
            {
                "type": "bind",
                "source": source,
                "destination": target,
                "options": ["rbind", *mode],
            }
        )
    path.write_text(json.dumps(config))


if __name__ == "__main__":
    main()
