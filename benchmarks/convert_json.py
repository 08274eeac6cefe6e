"""Speed of converting a log to Chrome's JSON format: `python -m benchmarks.convert_json`.

Records a session of the demo model and extends the log by repeating its decodes. In one run,
interleaved, it measures CPU seconds of this process for

    ours    from the NDJSON file to the complete trace, reading included
    peer    `json.dumps` of the same events, ready as Python values

so the ratio is a lower bound: making these events also takes time.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.harness import cpu_in_turns, median_ratio, record_demo, scratch, write_long_log
from llamacpp_instr.converters.exports.chrome import write_chrome
from llamacpp_instr.log.reader import read_events

PAIRS = 15
LOG_BYTES = 4 << 20


def main() -> None:
    with scratch() as folder:
        real, log, trace = (folder / name for name in ("real.log", "long.log", "long.json"))
        record_demo(real)
        n_ops, _ = write_long_log(real, log, LOG_BYTES)
        convert(log, trace)
        events = json.loads(trace.read_bytes())["traceEvents"]
        seconds = cpu_in_turns(
            PAIRS, ours=lambda: convert(log, Path("/dev/null")), peer=lambda: json.dumps(events)
        )
        size = trace.stat().st_size >> 20
        print(f"{n_ops:,} op slices, {len(events):,} events, {size} MiB of JSON")
        speed = median_ratio([len(events) / 1e6] * PAIRS, seconds["ours"])
        print(f"million events a CPU second: {speed}")
        print(f"times json.dumps:            {median_ratio(seconds['peer'], seconds['ours'])}")


def convert(log: Path, trace: Path) -> None:
    with trace.open("wb") as out:
        write_chrome(read_events(log), out)


if __name__ == "__main__":
    main()
