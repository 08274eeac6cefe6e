"""Takes the pictures of the docs: `make pictures`, or `python -m tests.programs.pictures`.

They show a session of the demo model as `instr view` opens it, and the first part of its page; they
are not edited.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import ROOT, read_events
from tests.kit.ui_kit import look, look_at_page, served

IMAGES = ROOT / "docs" / "images"
WIDTH = 1400
PAGE = (1000, 1900)
RECORDINGS = 8
"""the least disturbed one is shown: on a busy machine a thread may wait for a CPU"""


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        log = min((record(Path(folder) / f"{i}") for i in range(RECORDINGS)), key=slowness)
        with served(log) as address:
            look(address, picture=IMAGES / "session.png", size=(WIDTH, 700))
        trace = log.with_suffix(".pftrace")
        # without the arrows, which cover the names
        subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", "to-perfetto", log, "-o", trace],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
        visible, op = close_up(log)
        with served(trace) as address:
            closer = f"{address}&visStart={visible[0]}&visEnd={visible[1]}"
            look(closer, select=op, picture=IMAGES / "layer.png", size=(1160, 880))
        take_page(Path(folder))
    for picture in sorted(IMAGES.glob("*.png")):
        print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size:,} bytes")


def take_page(folder: Path) -> None:
    """The page of a longer session, from its beginning to the tree."""
    options = ("-n", "96", "--threads", "1")
    logs = [record(folder / f"long-{i}", *options) for i in range(RECORDINGS)]
    log = min(logs, key=whole_time)
    subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "page", log.name],
        cwd=log.parent, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
        capture_output=True,
    )  # fmt: skip
    look_at_page(log.with_suffix(".html"), size=PAGE, picture=IMAGES / "page.png", whole=False)


def record(folder: Path, *options: str) -> Path:
    folder.mkdir()
    log = folder / "session.log"
    subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "run", "demo", "-p", "Once upon a time",
         *(options or ("-n", "24")), "--level", "verbose", "--log", log],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    return log


def slowness(log: Path) -> int:
    return sum(compute["dur"] for compute in read_events(log, "compute")[:4])


def whole_time(log: Path) -> int:
    return sum(compute["dur"] for compute in read_events(log, "compute"))


def close_up(log: Path) -> tuple[tuple[int, int], str]:
    """The time range of a decode's first layer, with a margin, and SQL for its attention op."""
    decodes = read_events(log, "layers")[1:]
    layers = min(decodes, key=lambda layers: layers["dur"][layers["layer"].index(0)])
    at = layers["layer"].index(0)
    begin = layers["t"] + sum(layers["gap"][: at + 1]) + sum(layers["dur"][:at])
    end = begin + layers["dur"][at]
    margin = (end - begin) // 40
    return (begin - margin, end + margin), (
        "select s.id from slice s join track t on t.id = s.track_id where t.name = 'layers'"
        f" and s.name = 'FLASH_ATTN_EXT' and s.ts between {begin} and {end}"
    )


if __name__ == "__main__":
    main()
