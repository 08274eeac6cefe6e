"""Measures how fast the page of `instr weights --view` shows a large matrix.

`python -m benchmarks.weights_view` writes a matrix of 4096 by 14336 random weights as F16 and as
Q4_K, asks the server for every tile of some levels, one after the other, and lets Chromium zoom
from the whole to single weights and back, with one pane and with three. Prints medians and 99th
percentiles: of a tile, from the request to the last byte, and of the time between two frames.
"""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from benchmarks.harness import median_and_late, scratch
from llamacpp_instr.lab.view.tensors import Matrix
from tests.kit import ui_kit
from tests.kit.block_models import random_rows, write_blocks

N_ROWS, N_COLUMNS = 4096, 14336
NAME = "blk.0.ffn_down.weight"


def main() -> None:
    with scratch() as folder:
        f16, q4_k = (folder / f"{name}.gguf" for name in ("F16", "Q4_K"))
        write_models(f16, q4_k)
        for model in (f16, q4_k):
            with ui_kit.served(model, "--view", command="weights") as address:
                tiles(model.stem, Page(address))
            frames(model.stem, model)
        frames("Q4_K against F16", q4_k, "--reference", str(f16))


def write_models(f16: Path, q4_k: Path) -> None:
    """The weights are random; in Q4_K the bits are, with scales that a quantizer would choose."""
    random = np.random.default_rng(0)
    values = random.standard_normal((N_ROWS, N_COLUMNS), np.float32) * np.float32(0.02)
    write_blocks(f16, {NAME: ("F16", values.astype(np.float16))})
    blocks = random_rows("Q4_K", N_ROWS * N_COLUMNS // 256, 1)
    blocks[:, :4] = np.array([1.5e-4, 1e-3], "<f2").view(np.uint8)  # d and dmin
    write_blocks(q4_k, {NAME: ("Q4_K", blocks.reshape(N_ROWS, -1))})


class Page:
    """The page of a server, over one connection, once the server has measured the model."""

    def __init__(self, address: str) -> None:
        self._place = urlsplit(address)
        self._connection = http.client.HTTPConnection(self._place.netloc, timeout=100)
        while not json.loads(self.ask("figures"))["over"]:
            time.sleep(0.1)

    def ask(self, path: str) -> bytes:
        self._connection.request("GET", f"{self._place.path}{path}")
        answer = self._connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return data


def tiles(name: str, page: Page) -> None:
    """Print the times of tiles, by level; the first of a coarse level computes all of them."""
    matrix = Matrix(N_ROWS, N_COLUMNS, lambda *_: np.empty(0))
    for level in range(matrix.top, -1, -1):
        rows, columns = (-(-n // 256) for n in matrix.shape(level))
        places = [(row, column) for row in range(rows) for column in range(columns)]
        times = []
        for row, column in places[:: max(len(places) // 100, 1)]:
            begin = time.perf_counter()
            page.ask(f"tile/largest/0/0/{level}/{row}/{column}")
            times.append(1000 * (time.perf_counter() - begin))
        n_tiles = f"{len(times)} of {len(places)} tiles"
        print(f"{name}, level {level}: {n_tiles}, {median_and_late(times)}", flush=True)


def frames(name: str, model: Path, *options: str) -> None:
    """Print the times between frames while Chromium zooms."""
    with ui_kit.served(model, "--view", *options, command="weights") as address:
        Page(address)
        seen = ui_kit.run_script("zoom.mjs", address=address)
    for what, times in seen.items():
        print(f"{name}, {what}: {len(times)} frames, {median_and_late(times)}", flush=True)


if __name__ == "__main__":
    main()
