"""Packages of a newer Debian, unpacked into a folder: this machine's apt is not changed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

SUITE = "trixie"


def unpack_newer(package: str, into: Path) -> None:
    """The files of a package of `SUITE`. Only one call of apt, in a folder, uses that Debian."""
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
        subprocess.run([*apt, "download", package], check=True, cwd=place)
        (file,) = place.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", file, into], check=True)


def mirror() -> str:
    """The Debian mirror in this machine's apt sources."""
    words = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(COMPONENT) $(REPO_URI)"]
    printed = subprocess.check_output([*words, "Created-By: Packages"], text=True)
    found = re.search(r"^Debian main (\S*/debian/?)$", printed, re.M)
    assert found is not None, f"no Debian mirror in this machine's apt sources:\n{printed}"
    return found.group(1)
