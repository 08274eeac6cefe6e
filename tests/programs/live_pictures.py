"""Takes the pictures of docs/how-to/watch-a-session.md: `python -m tests.programs.live_pictures`.

They show a real recording, of four requests at once, in the page and in the terminal, and a
llama-server with four slots and eight clients.
"""

from __future__ import annotations

import asyncio
import html
import re
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llamacpp_instr.converters.live.live_session import LiveSession
from llamacpp_instr.converters.live.tui import LiveApp
from llamacpp_instr.log.runs import FollowedLog
from tests.kit import ui_kit
from tests.kit.llama_programs import llama_server
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.programs import recording
from tests.kit.ui_kit import look_at_page, served

IMAGES = ROOT / "docs" / "images"
TERMINAL = (110, 34)
WHO = ("a girl", "a boy", "a dog", "a cat", "a bird", "a king", "an owl", "a frog")
THINGS = ("who had a ball", "who lost a hat", "who liked to sing", "who went to a lake") * 5
TOKENS = 200
"""of each answer"""
SECONDS = 25
"""of recording before a picture"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "session.log"
        with recording(log, "--requests", 100000, "--pace", 0.02):
            time.sleep(SECONDS)
            with served(log, command="live") as address:
                take_page(address, IMAGES / "live.png")
            take_terminal(log, Path(folder), IMAGES / "live-tui.png")
        take_server(Path(folder) / "server.log", IMAGES / "live-server.png")


def take_server(log: Path, picture: Path) -> None:
    prompts = [[f"Once upon a time there was {who} {thing}" for thing in THINGS] for who in WHO]
    options = ("-c", "2048", "-np", "4")
    with llama_server(DEMO, log, *options) as server, ThreadPoolExecutor(1) as clients:
        clients.submit(server.complete_all, prompts, [[TOKENS] * len(THINGS)] * len(WHO))
        with served(log, command="live") as address:
            take_page(address, picture)


def take_page(address: str, picture: Path) -> None:
    ui_kit.run_script("live_back.mjs", address=address, width=1280, steps=100, picture=str(picture))


def take_terminal(log: Path, folder: Path, picture: Path) -> None:
    stop = threading.Event()
    session = LiveSession(FollowedLog(log, stop))
    session.start()

    async def take() -> str:
        app = LiveApp(session)
        async with app.run_test(size=TERMINAL) as pilot:
            while session.is_catching_up:
                await pilot.pause(0.1)
            await pilot.pause(0.5)
            return app.export_screenshot(title="instr live server.log --tui")

    svg = asyncio.run(take())
    stop.set()
    session.join()
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts of another host
    width, height = (float(n) for n in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0])
    page = folder / "terminal.html"
    page.write_text(f'<meta charset="utf-8"><title>{html.escape(log.name)}</title>'
                    f'<style>body {{ margin: 0 }} svg {{ width: 100% }}</style>{svg}')  # fmt: skip
    size = (1280, round(1280 * height / width))
    look_at_page(page, size=size, picture=picture, whole=False)


if __name__ == "__main__":
    main()
