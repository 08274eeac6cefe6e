"""Makes the pictures of docs/how-to/schedule-what-if.md: a block of Llama-3.2-1B on 4 engines.

    python -m benchmarks.schedule_pictures [--type Q8_0] [--runs 61]

Records a model with random weights of that shape (hidden size 2048, 32 heads of 64, 8 heads of keys
and values), whose decode sees 4 past tokens. The same tasks are scheduled on one engine, on four,
and on four with a part for each head; the times are measured. Prints the makespans. Run it on an
idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.shaped_model import LLAMA_1B_BLOCK, write_model
from llamacpp_instr.base.system import cache_dir
from llamacpp_instr.converters.scheduling.report import gantt_chart
from llamacpp_instr.converters.scheduling.schedule import schedule_list
from llamacpp_instr.converters.scheduling.sources import recorded_graph
from llamacpp_instr.converters.scheduling.split import Split, divide, part_shapes
from llamacpp_instr.converters.scheduling.tasks import equal_engines
from llamacpp_instr.log.session import load_session
from llamacpp_instr.prediction.probe.measure import time_parts
from tests.kit.native_kit import ROOT

PAST = "Once upon a time, I "
"""four tokens of five bytes"""
PICTURES: tuple[tuple[str, str, int, Split], ...] = (
    ("schedule-sequence", "One block on one engine", 1, "none"),
    ("schedule-parallel", "One block on four engines", 4, "none"),
    ("schedule-heads", "One block on four engines, a part for each head", 4, "heads"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--type", choices=["F16", "Q8_0"], default="Q8_0")
    parser.add_argument("--runs", type=int, default=61, help="each decodes the fifth token once")
    chosen = parser.parse_args()
    folder = cache_dir() / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    # the last block of a model also picks the rows that are wanted; the first does not
    shape = replace(LLAMA_1B_BLOCK, layers=2)
    model = write_model(folder / f"shaped-2048-{chosen.type}.gguf", shape, chosen.type)
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "block.log"
        record(model, chosen.runs, log)
        found = recorded_graph(load_session(log), layers=(0, 0))
    times = {kernel: time_parts(shape) for kernel, shape in part_shapes(found.timed).items()}
    print(*found.notes, sep="\n")
    for name, title, n, split in PICTURES:
        engines = equal_engines(n)
        divided = divide(found.timed, split, engines, times if split == "heads" else {})
        made = schedule_list(divided.tasks, engines)
        chart = gantt_chart(made, title)
        assert chart is not None
        (ROOT / "docs" / "images" / f"{name}.png").write_bytes(chart.png())
        print(f"{title}: {made.makespan / 1e6:.3f} ms", *divided.notes)


def record(model: Path, runs: int, log: Path) -> None:
    command = [sys.executable, "-m", "llamacpp_instr", "run", model, "--prompt", PAST, "-n", "2",
               "--repeat", runs, "--threads", "1", "--ctx", "256", "--log", log]  # fmt: skip
    subprocess.run([*map(str, command)], check=True, capture_output=True)


if __name__ == "__main__":
    main()
