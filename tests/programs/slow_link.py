"""A link between two network namespaces that takes time: `slow_link.py DELAY_MS MBIT A B NAME`.

It makes a device NAME in A, and one `link` in B, prints a line, and then carries packets in both
directions until it is killed. A packet arrives DELAY_MS after the link has carried it, at MBIT
million bits per second; 0 is no limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import queue
import struct
import sys
import threading
import time
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PR_SET_TIMERSLACK, _CLONE_NEWNET = 29, 0x40000000


def open_device(namespace: str, name: str) -> int:
    """Its packets: each read and each write is one."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), namespace)
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def carry(source: int, to: int, delay_s: float, bits_per_s: float) -> None:
    packets: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def deliver() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        while True:
            due, packet = packets.get()
            if (left := due - time.monotonic()) > 0:
                time.sleep(left)
            with contextlib.suppress(OSError):  # the other end is not up yet
                os.write(to, packet)

    threading.Thread(target=deliver, daemon=True).start()
    carried = 0.0
    while True:
        packet = os.read(source, 1 << 16)
        now = time.monotonic()
        carried = max(carried, now) + (8 * len(packet) / bits_per_s if bits_per_s else 0)
        packets.put((carried + delay_s, packet))


def main() -> None:
    delay_s, bits_per_s = float(sys.argv[1]) / 1e3, float(sys.argv[2]) * 1e6
    a, b = open_device(sys.argv[3], sys.argv[5]), open_device(sys.argv[4], "link")
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    sys.setswitchinterval(1e-4)
    print("ready", flush=True)
    threading.Thread(target=carry, args=(a, b, delay_s, bits_per_s), daemon=True).start()
    carry(b, a, delay_s, bits_per_s)


if __name__ == "__main__":
    main()
