"""Docker's engine and compose, from Debian's packages if this machine lacks them."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ENGINE = {
    "dockerd": "docker.io",
    "docker": "docker.io",
    "iptables": "iptables",
    "ip": "iproute2",
}
"""programs, and the packages that contain them"""

SUITE = "trixie"
"""the first Debian whose docker-compose is the plugin: one static file that runs on others, too"""


def install_engine() -> None:
    missing = {package for program, package in ENGINE.items() if shutil.which(program) is None}
    if missing:
        for words in (["update", "-qq"], ["install", "-qq", "--no-install-recommends", *missing]):
            subprocess.run(["apt-get", "--yes", *words], check=True)


def compose_plugin(kept: Path) -> Path:
    """The file `docker-compose` that provides `docker compose`, unpacked into a folder once.

    This machine's apt is not changed: only one call, in a folder, uses the newer Debian.
    """
    plugin = kept / "docker-compose"
    if plugin.is_file():
        return plugin
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        for folder in ("lists/partial", "cache/archives/partial", "parts"):
            (place / folder).mkdir(parents=True)
        (place / "sources.list").write_text(f"deb {mirror()} {SUITE} main\n")
        settings = {
            "Dir::Etc::SourceList": place / "sources.list",
            "Dir::Etc::SourceParts": place / "parts",
            "Dir::State::Lists": place / "lists",
            "Dir::Cache": place / "cache",
            "APT::Sandbox::User": "root",
        }
        apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in settings.items())]
        subprocess.run([*apt, "update"], check=True)
        subprocess.run([*apt, "download", "docker-compose"], check=True, cwd=place)
        (package,) = place.glob("docker-compose_*.deb")
        subprocess.run(["dpkg", "-x", package, place / "files"], check=True)
        (found,) = place.glob("files/usr/*/docker/cli-plugins/docker-compose")
        kept.mkdir(parents=True, exist_ok=True)
        shutil.copy2(found, plugin)
    return plugin


def mirror() -> str:
    """The Debian mirror in this machine's apt sources."""
    words = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(COMPONENT) $(REPO_URI)"]
    said = subprocess.check_output([*words, "Created-By: Packages"], text=True)
    found = re.search(r"^Debian main (\S*/debian/?)$", said, re.M)
    assert found is not None, f"no Debian mirror in this machine's apt sources:\n{said}"
    return found.group(1)
