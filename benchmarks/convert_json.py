"""Speed of converting a log to Chrome's JSON format.

    python -m benchmarks.convert_json

Records a session of the demo model and extends the log by repeating its decodes. In one run, in
turns, it measures CPU seconds of this process for

    ours    from the NDJSON file to the complete trace, reading included
    peer    `json.dumps` of the same events, ready as Python values

so the ratio is a lower bound: making these events also takes time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.convert import cpu
from benchmarks.long_log import write_long_log
from benchmarks.ratios import median_ratio
from llamacpp_instr.converters.exports.chrome import write_chrome
from llamacpp_instr.log.reader import read_events

PAIRS = 15
LOG_BYTES = 4 << 20


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        real, log, trace = (Path(folder) / name for name in ("real.log", "long.log", "long.json"))
        command = f"run demo -p Once -n 32 --level detailed --log {real}".split()
        subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", *command], check=True, capture_output=True
        )
        n_ops = write_long_log(real, log, LOG_BYTES)
        with trace.open("wb") as file:
            write_chrome(read_events(log), file)
        events = json.loads(trace.read_bytes())["traceEvents"]
        ours, peer = list[float](), list[float]()
        for _ in range(PAIRS):
            ours.append(cpu(convert, log))
            peer.append(cpu(json.dumps, events))
        size = trace.stat().st_size >> 20
        print(f"{n_ops:,} op slices, {len(events):,} events, {size} MiB of JSON")
        speed = median_ratio([len(events) / 1e6] * PAIRS, ours)
        print(f"million events a CPU second: {speed}")
        print(f"times json.dumps:            {median_ratio(peer, ours)}")


def convert(log: Path) -> None:
    with Path("/dev/null").open("wb") as out:
        write_chrome(read_events(log), out)


if __name__ == "__main__":
    main()
