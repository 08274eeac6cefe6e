"""A file system that stops answering, like one of a network that is gone.

`python -m tests.kit.stopping_disk DIR COMMAND...` mounts it at DIR (in a namespace of its own, see
`unshare`) and runs the command. It keeps files in memory. Once the command has asked for the file
`stop` in it, it never answers again: a process that writes to it waits. It speaks the kernel's FUSE
protocol, as `linux/fuse.h` has it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

ROOT = 1
LOOKUP, FORGET, GETATTR, SETATTR, UNLINK = 1, 2, 3, 4, 10
OPEN, WRITE, RELEASE, INIT, CREATE, INTERRUPT = 14, 16, 18, 26, 35, 36


class Disk:
    """The files of the root directory, by number; their names are those of `names`."""

    def __init__(self) -> None:
        self.names: dict[bytes, int] = {}
        self.sizes: dict[int, int] = {}
        self.stops = False

    def answer(self, opcode: int, node: int, body: bytes) -> bytes | int:
        """The body of an answer, or an errno."""
        does: dict[int, Callable[[int, bytes], bytes | int]] = {
            INIT: lambda *_: struct.pack("<4I2H2I36x", 7, 31, 0, 0, 8, 8, 1 << 17, 1),
            LOOKUP: lambda _, name: self._lookup(name.rstrip(b"\0")),
            GETATTR: lambda node, _: struct.pack("<QII", 0, 0, 0) + self._attributes(node),
            SETATTR: lambda node, _: struct.pack("<QII", 0, 0, 0) + self._attributes(node),
            UNLINK: lambda _, name: b"" if self.names.pop(name.rstrip(b"\0"), 0) else errno.ENOENT,
            CREATE: lambda _, body: self._create(body[16:].rstrip(b"\0")),
            OPEN: lambda *_: struct.pack("<QII", 0, 0, 0),
            WRITE: self._write,
            RELEASE: lambda *_: b"",
        }  # fmt: skip
        return does[opcode](node, body) if opcode in does else errno.ENOSYS

    def _lookup(self, name: bytes) -> bytes | int:
        self.stops = self.stops or name == b"stop"
        return self._entry(self.names[name]) if name in self.names else errno.ENOENT

    def _create(self, name: bytes) -> bytes:
        node = self.names[name] = 2 + len(self.sizes)
        self.sizes[node] = 0
        return self._entry(node) + struct.pack("<QII", 0, 0, 0)

    def _write(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        self.sizes[node] = max(self.sizes[node], offset + size)
        return struct.pack("<II", size, 0)

    def _entry(self, node: int) -> bytes:
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + self._attributes(node)

    def _attributes(self, node: int) -> bytes:
        kind = stat.S_IFDIR | 0o700 if node == ROOT else stat.S_IFREG | 0o600
        size = self.sizes.get(node, 0)
        return struct.pack("<6Q10I", node, size, 0, 0, 0, 0, 0, 0, 0, kind, 1, 0, 0, 0, 4096, 0)


def serve(channel: int, disk: Disk) -> None:
    while not disk.stops:
        request = os.read(channel, 1 << 20)
        _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
        if opcode in (FORGET, INTERRUPT):
            continue
        answer = disk.answer(opcode, node, request[40:])
        error, body = (-answer, b"") if isinstance(answer, int) else (0, answer)
        os.write(channel, struct.pack("<IiQ", 16 + len(body), error, unique) + body)


def main() -> None:
    directory, *command = sys.argv[1:]
    channel = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={channel},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"disk", directory.encode(), b"fuse", ctypes.c_ulong(0), options)
    assert mounted == 0, os.strerror(ctypes.get_errno())
    threading.Thread(target=serve, args=(channel, Disk()), daemon=True).start()
    # the kernel learns that this disk needs no message when a file is closed: the end of a process
    # would wait for the answer
    Path(directory, "first").touch()
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
