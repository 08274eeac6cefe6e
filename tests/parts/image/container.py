"""Runs commands in a built image through buildah, like `docker run --rm`.

Works only inside tests/parts/image/build_image.sh, which defines where the image is.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 300

_BUILDAH_SAYS = re.compile(
    r"^(?:subprocess exited|Error:) (?:with|exit) status \d+\n", re.MULTILINE
)
"""what buildah adds to the output of a command that fails"""

_DID_NOT_START = "Close_Fd sealing memfd copy: Device or resource busy"
"""buildah starts itself from a copy in memory; the kernel rarely refuses to seal that copy, and
then nothing has run yet"""

Volumes = dict[Path, str]
"""directory of this machine -> path in the container; `:ro` at its end means read-only"""


@dataclass(frozen=True)
class Image:
    name: str

    @property
    def config(self) -> dict[str, Any]:
        """The part of `docker inspect` named Config: Entrypoint, User, Env, Labels and so on."""
        config: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", self.name))[
            "Docker"
        ]["config"]
        return config

    @property
    def size(self) -> int:
        """Bytes of all layers as archives; Docker counts only their files, 2 % less."""
        listed = json.loads(buildah("images", "--json", self.name))
        # buildah prints it as "345 MB"
        number, unit = listed[0]["size"].split()
        return round(float(number) * {"MB": 1e6, "GB": 1e9}[unit])

    @contextmanager
    def container(self) -> Iterator[str]:
        """A container of the image, removed at the end; yields its id."""
        container = buildah("from", "--pull-never", self.name).strip()
        try:
            yield container
        finally:
            buildah("rm", container)

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """A directory with the files of the image."""
        with self.container() as container:
            yield Path(buildah("mount", container).strip())

    def run(
        self,
        *arguments: str,
        user: str | None = None,
        volumes: Volumes | None = None,
        entrypoint: Sequence[str] | None = None,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run the entry point with `arguments`; `user` is `uid:gid`, by default the image's."""
        options: list[str] = [] if user is None else ["--user", user]
        for directory, place in (volumes or {}).items():
            options += ["--volume", f"{directory}:{place}"]
        command = list(self.config["Entrypoint"] if entrypoint is None else entrypoint)
        with self.container() as container:
            done = _run("run", *options, container, "--", *command, *arguments, stdin=stdin)
        done.stderr = _BUILDAH_SAYS.sub("", done.stderr)
        return done


def buildah(*arguments: str) -> str:
    done = _run(*arguments)
    assert done.returncode == 0, f"buildah {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def _run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    for _ in range(5):
        done = subprocess.run(
            ["buildah", *arguments], input=stdin, capture_output=True, text=True, timeout=SECONDS
        )
        if done.returncode == 0 or _DID_NOT_START not in done.stderr:
            break
    return done
