"""CPU seconds of loading a log as DataFrames: `python -m benchmarks.tables`.

The log has a million ops: the steps of the recorded session in tests/fixtures, repeated with new
numbers. The peer makes a dict of every op of the same log with `json.loads`, and a list of them.
Each is measured in a process of its own, without the time to import pandas.

Most of the time of `load_tables` is spent on turning Python lists of integers into arrays, and on
repeating an op's properties for every row; decoding the JSON takes a sixth.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

import msgspec

from llamacpp_instr.base.system import need
from llamacpp_instr.log.batches import Batches
from llamacpp_instr.log.schema import StepBegin, Token

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "tests" / "fixtures" / "demo-verbose.log"
NUMBERED = ("step", "compute")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--work", nargs=2, metavar=("WHAT", "LOG"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        print(json.dumps(WORK[asked.work[0]](Path(asked.work[1]))))
        return
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "long.log"
        n_ops = write_long_log(log, asked.ops)
        print(f"{n_ops:,} ops, {log.stat().st_size / 1e6:.0f} MB of NDJSON")
        best: dict[str, float] = {}
        for what in WORK:
            for _ in range(asked.runs):
                for name, seconds in measure(what, log).items():
                    best[name] = min(seconds, best.get(name, seconds))
    for name, seconds in best.items():
        print(f"{name:<50} {seconds:6.2f}")
    ratio = best["rows of dicts, json.loads, CPU s"] / best["load_tables, CPU s"]
    print(f"rows of dicts / load_tables: {ratio:.1f}")


def write_long_log(path: Path, n_ops: int) -> int:
    """Write the recorded session with its steps repeated until there are `n_ops` ops."""
    events = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    decodes = [e for e in events if e.get("step", -1) > 1 or e.get("compute", -1) > 1]
    head = [e for e in events if e not in decodes and e["event"] != "session_end"]
    steps = {e["step"] for e in decodes if e["event"] == "step_end"}
    ops = [e for e in events if e["event"] == "ops"]
    written = sum(len(e["dur"]) for e in ops if e not in decodes)
    shift, span = 0, events[-1]["t"] - events[0]["t"]
    with path.open("w") as file:
        file.writelines(json.dumps(e, separators=(",", ":")) + "\n" for e in head)
        while written < n_ops:
            for event in decodes:
                moved = {
                    k: event[k] + shift * len(steps) for k in NUMBERED if event.get(k, -1) >= 0
                }
                moved["t"] = event["t"] + shift * span
                file.write(json.dumps({**event, **moved}, separators=(",", ":")) + "\n")
            written += sum(len(e["dur"]) for e in decodes if e["event"] == "ops")
            shift += 1
    return written


def measure(what: str, log: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.tables", "--work", what, str(log)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def by_tables(log: Path) -> dict[str, float]:
    from llamacpp_instr.converters.exports.tables import tables_of
    from llamacpp_instr.log.reader import read_events
    from llamacpp_instr.log.session import load_session

    begin = time.process_time()
    for _ in read_events(log):
        pass
    decoded = time.process_time()
    session = load_session(log)
    loaded = time.process_time()
    ops = tables_of(session).ops
    end = time.process_time()
    assert len(ops)
    return {
        "load_tables, CPU s": end - decoded,
        "  of it decoding JSON into lists (msgspec)": decoded - begin,
        "  of it lists into columns (numpy)": loaded - decoded - (decoded - begin),
        "  of it columns into DataFrames": end - loaded,
    }


def by_parquet(log: Path) -> dict[str, float]:
    from llamacpp_instr.converters.exports.table_files import write_parquet
    from llamacpp_instr.converters.exports.tables import stream_tables

    need("parquet")
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as directory:
        write_parquet(stream_tables(log), Path(directory))
    seconds = time.process_time() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {"to-parquet, CPU s": seconds, "to-parquet, peak MB resident": peak}


def by_rows(log: Path) -> dict[str, float]:
    import pandas as pd

    begin = time.process_time()
    rows, nodes, plans, batches, phase, step = [], {}, {}, {}, {}, {}
    with log.open() as file:
        for event in map(json.loads, file):
            kind = event["event"]
            if kind == "graph":
                nodes[event["graph"]] = event["nodes"]
            elif kind == "plan":
                plans[event["plan"]] = (nodes[event["graph"]], event["node"])
            elif kind == "context":
                batches[event["ctx"]] = Batches(event["n_batch"])
            elif kind == "step_begin":
                parts = batches[event["ctx"]].parts(msgspec.convert(event, StepBegin))
                is_prompt = any(part.prompt for part in parts)
                phase[event["step"]] = "prefill" if is_prompt else event["kind"]
            elif kind == "token":
                batches[event["ctx"]].sampled(msgspec.convert(event, Token))
            elif kind == "compute":
                step[event["compute"]] = event["step"]
            elif kind == "ops":
                of, kernels = plans[event["plan"]]
                where = {"step": step[event["compute"]], "thread": event.get("thread", 0)}
                where["phase"] = phase[where["step"]]
                gaps = event.get("gap") or [0] * len(kernels)
                ends = accumulate(g + d for g, d in zip(gaps, event["dur"], strict=True))
                for node, dur, at in zip(kernels, event["dur"], ends, strict=True):
                    names = {key: of[key][node] for key in ("name", "op", "layer", "type")}
                    rows.append({**where, **names, "begin": event["t"] + at - dur, "dur": dur})
    assert len(pd.DataFrame(rows))
    return {"rows of dicts, json.loads, CPU s": time.process_time() - begin}


WORK = {"tables": by_tables, "parquet": by_parquet, "rows": by_rows}

if __name__ == "__main__":
    main()
