"""Viewers of `instr live`: they take every frame and note what they got.

    python -m tests.kit.live_viewers ADDRESS [--viewers 8] [--leave 0] [--receive 0]

Prints `frame N BYTES` for each frame of the first viewer. Ends when standard input ends or the
session is over, with one JSON line: for each viewer its frames as [number, lost, is key, bytes,
checksum].
`--leave N` makes the first viewer leave after every N frames and come back. `--receive` is the
number of bytes that the system keeps for each viewer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import socket
import sys
import zlib
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

Frame = tuple[int, int, bool, int, int]
NUMBER = re.compile(r'"frame":(\d+)[,}]')
LOST = re.compile(r'"lost":(\d+)[,}]')


async def view(address: str, frames: list[Frame], leave: int, receive: int, tell: bool) -> None:
    """Take frames until the server has no more."""
    place = urlsplit(address)
    while True:
        after = frames[-1][0] if frames else -1
        sock = socket.socket()
        if receive:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
        sock.connect((place.hostname, place.port))
        url = f"ws://{place.netloc}{place.path}frames?after={after}"
        more: dict[str, Any] = {"max_queue": 1} if receive else {}
        async with connect(url, sock=sock, max_size=None, compression=None, **more) as server:
            for n in range(sys.maxsize):
                if leave and n == leave:
                    break
                try:
                    data = str(await server.recv())
                except ConnectionClosed:
                    return
                frames.append(_facts(data))
                if tell:
                    print("frame", frames[-1][0], len(data), flush=True)


def _facts(data: str) -> Frame:
    number, lost = NUMBER.findall(data), LOST.findall(data)
    n_lost = int(lost[-1]) if lost else 0
    return int(number[-1]), n_lost, '"key":true' in data, len(data), zlib.crc32(data.encode())


async def watch(address: str, n: int, leave: int, receive: int) -> list[list[Frame]]:
    seen: list[list[Frame]] = [[] for _ in range(n)]
    viewers = [
        asyncio.create_task(view(address, frames, leave * (not i), receive, i == 0))
        for i, frames in enumerate(seen)
    ]
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    everybody = asyncio.gather(*viewers)
    waits = asyncio.create_task(ended.wait())
    await asyncio.wait([everybody, waits], return_when=asyncio.FIRST_COMPLETED)
    loop.remove_reader(sys.stdin.fileno())
    everybody.cancel()
    with suppress(asyncio.CancelledError):
        await everybody
    return seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--viewers", type=int, default=8)
    parser.add_argument("--leave", type=int, default=0)
    parser.add_argument("--receive", type=int, default=0)
    asked = parser.parse_args()
    seen = asyncio.run(watch(asked.address, asked.viewers, asked.leave, asked.receive))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
