"""Runs a check only when what it tests has changed since it last passed on this machine.

    python -m tools.unchanged NAME PATH... -- COMMAND...

The digest covers the tracked files below the paths, and the command. It is kept in the product's
cache once the command has exited with status 0.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from llamacpp_instr.llama.build.wheel import own_cache

ROOT = Path(__file__).resolve().parent.parent


def digest_of(paths: list[str], command: list[str]) -> str:
    """A digest of the names and contents of the tracked files below `paths`, and of the command."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], cwd=ROOT, capture_output=True, check=True
    )
    digest = hashlib.sha256("\0".join(command).encode())
    for name in sorted(filter(None, listed.stdout.decode().split("\0"))):
        path = ROOT / name
        data = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        digest.update(f"{name}\0{hashlib.sha256(data).hexdigest()}\0".encode())
    return digest.hexdigest()


def main() -> int:
    name, *arguments = sys.argv[1:]
    at = arguments.index("--")
    paths, command = arguments[:at], arguments[at + 1 :]
    kept = own_cache() / "passed" / name
    digest = digest_of(paths, command)
    if kept.is_file() and kept.read_text() == digest:
        print(f"{name}: passed before with the same files; not run again")
        return 0
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status == 0:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(digest)
    return status


if __name__ == "__main__":
    sys.exit(main())
