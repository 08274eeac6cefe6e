"""A new user with an empty home and a fresh clone, who types the commands of a page.

Only what is slow to create is shared with this machine: the build cache, ccache, and the settings
and caches of pip and npm. Nothing of the test environment is visible.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llamacpp_instr.base.system import cache_dir
from tests.kit.commands_kit import Line, start, write_browser
from tests.kit.native_kit import ROOT

SECONDS = 3600
"""time limit for one line: the longest compiles llama.cpp without ccache"""

_OURS = ("PYTHON", "PYTEST", "LLAMA", "MAKE", "MFLAGS", "VIRTUAL_ENV", "TESTS", "CCACHE_BASEDIR")


@dataclass(frozen=True)
class Newcomer:
    """Runs lines in `directory`, the clone; `home` and its siblings are removed at the end."""

    place: Path
    environment: dict[str, str]
    ran: list[Line] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.place / "clone"

    def clone(self, name: str) -> Newcomer:
        """The same user with another fresh clone, below `name`."""
        place = self.place / name
        place.mkdir()
        _clone(place / "clone")
        return Newcomer(place, self.environment, self.ran)

    def within(self, environment: Path) -> Newcomer:
        """The same user in an active Python environment."""
        path = f"{environment / 'bin'}{os.pathsep}{self.environment['PATH']}"
        return Newcomer(self.place, {**self.environment, "PATH": path}, self.ran)

    def run(
        self, *lines: Line, put: dict[str, str] | None = None, more: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run lines in one shell until one fails, with placeholders replaced; `more` is appended.
        Standard error is part of the output."""
        script = "\n".join(line.text for line in lines) + more
        for placeholder, value in (put or {}).items():
            assert placeholder in script
            script = script.replace(placeholder, value)
        self.ran.extend(lines)
        return self.type(script, **variables)

    def type(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a script that is not on a page."""
        return subprocess.run(
            ["bash", "-ec", script],
            cwd=self.directory, env=self.environment | variables, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
        )  # fmt: skip

    def start(self, line: Line, output: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a line that does not end on its own, like `commands_kit.Place`."""
        self.ran.append(line)
        return start(line, self.directory, self.environment | variables, output)


@contextmanager
def newcomer() -> Iterator[Newcomer]:
    """A user with a clone of the committed files; several GB may be written beside it."""
    with tempfile.TemporaryDirectory(prefix="newcomer-", ignore_cleanup_errors=True) as name:
        place = Path(name).resolve()
        home = place / "home"
        home.mkdir()
        _clone(place / "clone")
        theirs = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
        environment = {
            **theirs,
            **pip_settings(),
            **_caches_of_the_machine(),
            "HOME": str(home),
            "LLAMACPP_INSTR_CACHE": str(cache_dir()),
            "BROWSER": str(write_browser(place)),
            # so that ccache finds the objects of another newcomer's directory
            "CCACHE_BASEDIR": str(place),
            "CCACHE_NOHASHDIR": "1",
        }
        yield Newcomer(place, environment)


def _clone(directory: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(directory)], check=True)


def pip_settings() -> dict[str, str]:
    """Variables with which pip and npm find the index that the real home names."""
    home = Path.home()
    settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    for file in (home / ".pip" / "pip.conf", config / "pip" / "pip.conf"):
        if file.is_file() and "PIP_CONFIG_FILE" not in os.environ:
            settings["PIP_CONFIG_FILE"] = str(file)
    if (home / ".npmrc").is_file():
        settings["npm_config_userconfig"] = str(home / ".npmrc")
    return settings


def _caches_of_the_machine() -> dict[str, str]:
    """Variables for what pip, npm and ccache keep in the real home."""
    caches = {"PIP_CACHE_DIR": _printed([sys.executable, "-m", "pip", "cache", "dir"])}
    if shutil.which("npm"):
        caches["npm_config_cache"] = str(Path.home() / ".npm")
    if shutil.which("ccache"):
        caches["CCACHE_DIR"] = _printed(["ccache", "--get-config", "cache_dir"])
    return caches


def _printed(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
