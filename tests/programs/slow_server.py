"""Records the logs of docs/tutorials/slow-server.md: `python -m tests.programs.slow_server MODEL`.

Six clients talk with a llama-server of two slots, three turns each. Their prompts begin with the
time of day, and in the second log they end with it. The level is `minimal`, so the logs are small.
"""

from __future__ import annotations

import gzip
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from tests.kit.llama_programs import Server, llama_server, programs
from tests.kit.native_kit import ROOT

PLACE = ROOT / "docs" / "tutorials"
CLIENTS, TURNS, TOKENS = 6, 3, 24
RULES = (
    "You answer questions of guests of a small hotel by the sea. Breakfast is from seven to ten "
    "in the room on the first floor, and guests who leave early find a box at the desk. The key "
    "card opens the garage, the garden and the sauna until eleven at night. Dogs are welcome, "
    "but not in the room where breakfast is served. The bus to the old town leaves every twenty "
    "minutes from the stop behind the church, and the last one comes back at midnight. Towels "
    "for the beach are at the desk. Guests with a car pay for the garage when they leave. If "
    "you do not know an answer, say so, and give the number of the desk, which is nine. Never "
    "promise a room that you have not seen. Be brief and friendly, and answer in the language "
    "of the guest. "
)
QUESTIONS = (
    "When is breakfast?", "May my dog come, too?", "Where does the bus leave?",
    "Who has towels?", "What does the garage cost?", "When does the sauna close?",
)  # fmt: skip


def main() -> None:
    model = Path(sys.argv[1])
    for name, first in (("slow-server", True), ("faster-server", False)):
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / f"{name}.log"
            os.environ["LLAMA_INSTR_LEVEL"] = "minimal"
            with (
                llama_server(model, log, "-c", "4096", "-np", "2") as server,
                ThreadPoolExecutor(CLIENTS) as pool,
            ):
                list(pool.map(partial(talk, server, time_first=first), range(CLIENTS)))
            text = log.read_text(encoding="utf-8")
            for place in (model.parent, programs(), folder):
                text = text.replace(f"{place}/", "")
            packed = gzip.compress(text.encode(), 9, mtime=0)
        (PLACE / f"{name}.log.gz").write_bytes(packed)
        print(f"{name}.log.gz: {len(packed):,} bytes")


def talk(server: Server, guest: int, *, time_first: bool) -> None:
    """All turns of one client; `time_first` puts the time of day before the rules."""
    dialog = ""
    for turn in range(TURNS):
        now = f"It is {14 + turn}:{7 * guest + 3:02}."
        dialog += f"\nGuest: {QUESTIONS[(guest + turn) % len(QUESTIONS)]}\nDesk:"
        prompt = f"{now} {RULES}{dialog}" if time_first else f"{RULES}{dialog} ({now})"
        dialog += server.complete(prompt, TOKENS + guest).text


if __name__ == "__main__":
    main()
