"""Docker's engine and compose, from Debian's packages if this machine lacks them."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.kit.debian import unpack_newer

ENGINE = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "iptables": "iptables",
    "ip": "iproute2",
}
"""programs, and the packages that contain them"""


def install_engine() -> None:
    missing = {package for program, package in ENGINE.items() if shutil.which(program) is None}
    if missing:
        for words in (["update", "-qq"], ["install", "-qq", "--no-install-recommends", *missing]):
            subprocess.run(["apt-get", "--yes", *words], check=True)


def compose_plugin(kept: Path) -> Path:
    """The file `docker-compose` that provides `docker compose`, unpacked into a folder once: one
    static file of the first Debian whose docker-compose is the plugin. It also runs on others."""
    plugin = kept / "docker-compose"
    if not plugin.is_file():
        with tempfile.TemporaryDirectory() as name:
            unpack_newer("docker-compose", Path(name))
            (found,) = Path(name).glob("usr/*/docker/cli-plugins/docker-compose")
            kept.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, plugin)
    return plugin
