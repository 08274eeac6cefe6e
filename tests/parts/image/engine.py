"""A Docker engine for the tests: starts in its own folder and is stopped with everything it made.

It shares nothing with an engine that this machine may have: it has another socket, store, bridge
and containerd namespace. Needs root.

Its containers are on a bridge with access to the network, as with any engine, so `docker build`
needs no network option. Docker would create the bridge and the rules itself but does not remove
them, so this module creates and removes them.

How this machine reaches its package registries does not belong in a Dockerfile, and Docker's
builder cannot mount files. So during a build, `access` lets the engine's runtime (runtime.py) mount
them. Other containers see only the image.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

BRIDGE, ADDRESS, NETWORK = "instr-test0", "10.213.0.1/24", "10.213.0.0/24"
WAY_OUT = ["POSTROUTING", "-s", NETWORK, "!", "-o", BRIDGE, "-j", "MASQUERADE"]
NAMESPACE = "llamacpp-instr-test"

SECONDS = 60
"""time limit to start, and to stop"""


class Engine:
    """A running `dockerd`. The images and layers in `data` are kept for the next run."""

    def __init__(self, data: Path, folder: Path) -> None:
        self._folder, self._mounts = folder, folder / "mounts.json"
        self.host = f"unix://{folder / 'docker.sock'}"
        runtime = folder / "runtime"
        words = [sys.executable, str(Path(__file__).parent / "runtime.py"), str(self._mounts)]
        runtime.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        runtime.chmod(0o755)
        self._mounts.write_text("[]")
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    # the engine ends if the suite is killed
                    *("setpriv", "--pdeathsig", "TERM", "dockerd"),
                    *("--data-root", data, "--exec-root", folder / "exec"),
                    *("--pidfile", folder / "pid", "--host", self.host),
                    *("--bridge", BRIDGE, "--mtu", mtu()),
                    *("--iptables=false", "--ip6tables=false"),
                    *("--containerd-namespace", NAMESPACE),
                    *("--containerd-plugins-namespace", f"{NAMESPACE}-plugins"),
                    *("--add-runtime", f"test={runtime}", "--default-runtime", "test"),
                ],
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + SECONDS
        asked = ["docker", "-H", self.host, "version"]
        while subprocess.run(asked, capture_output=True).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > until:
                self._end()
                raise RuntimeError(f"dockerd does not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.2)

    def let_in(self, uid: int, gid: int) -> None:
        """Let another user use the engine, like a member of the group `docker`."""
        os.chown(self.host.removeprefix("unix://"), uid, gid)

    def docker(self, *arguments: str) -> str:
        done = subprocess.run(
            ["docker", "-H", self.host, *arguments], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def access(self, mounts: Sequence[str]) -> Iterator[None]:
        """Mount these into every container started inside: `source:target` or
        `source:target:ro`."""
        self._mounts.write_text(json.dumps([mount.split(":") for mount in mounts]))
        try:
            yield
        finally:
            self._mounts.write_text("[]")

    def remove_containers(self) -> None:
        containers = self.docker("ps", "--all", "--quiet").split()
        if containers:
            self.docker("rm", "--force", *containers)

    def stop(self) -> None:
        if self._process.poll() is None:
            self.remove_containers()
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=SECONDS)


@contextlib.contextmanager
def running(data: Path) -> Iterator[Engine]:
    """An engine with its network. Both are removed afterwards, except `data`. One at a time."""
    data.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as after:
        lock = after.enter_context((Path(tempfile.gettempdir()) / f"{BRIDGE}.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        # the path of a socket must be short, and other users must be able to enter the folder
        folder = Path(tempfile.mkdtemp(prefix="engine-"))
        folder.chmod(0o755)
        after.callback(shutil.rmtree, folder)
        after.callback(unmount, folder)
        remove_network()
        after.callback(remove_network)
        make_network()
        engine = Engine(data, folder)
        after.callback(engine.stop)
        engine.remove_containers()  # of a suite that was killed
        yield engine


def make_network() -> None:
    for words in (
        ["ip", "link", "add", BRIDGE, "type", "bridge"],
        ["ip", "address", "add", ADDRESS, "dev", BRIDGE],
        ["ip", "link", "set", BRIDGE, "up"],
        ["iptables", "-t", "nat", "-A", *WAY_OUT],
    ):
        subprocess.run(words, check=True)


def remove_network() -> None:
    """Also removes what a killed suite left."""
    for words in (["iptables", "-t", "nat", "-D", *WAY_OUT], ["ip", "link", "delete", BRIDGE]):
        subprocess.run(words, capture_output=True)


def unmount(folder: Path) -> None:
    """Remove the mount for the host's network that dockerd leaves in its folder."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in sorted(mounts, reverse=True):
        if mount.startswith(f"{folder}/"):
            subprocess.run(["umount", "--lazy", mount], check=True)


def mtu() -> str:
    """The MTU of the default route; some networks drop larger packets."""
    route = json.loads(subprocess.check_output(["ip", "-json", "route", "show", "default"]))
    device = route[0]["dev"] if route else "lo"
    return str(min(1500, int(Path(f"/sys/class/net/{device}/mtu").read_text())))
