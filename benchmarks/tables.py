"""CPU seconds of loading a log as DataFrames: `python -m benchmarks.tables`.

The log has a million ops: the steps of the recorded session in tests/fixtures, repeated with new
numbers. The peer makes a dict of every op of the same log with `json.loads`, and a list of them.
Each is measured in a process of its own, without the time to import pandas.

Most of the time of `load_tables` is spent on turning Python lists of integers into arrays, and on
repeating an op's properties for every row; decoding the JSON takes a sixth.
"""

from __future__ import annotations

import json
import time
from collections import deque
from itertools import accumulate
from pathlib import Path

import msgspec
import pandas as pd

from benchmarks.harness import (
    RECORDED,
    arguments,
    cost_of_instr,
    in_own_process,
    scratch,
    write_long_log,
)
from llamacpp_instr.converters.exports.tables import tables_of
from llamacpp_instr.log.batches import Batches
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import StepBegin, Token
from llamacpp_instr.log.session import load_session


def main() -> None:
    args = arguments(__doc__, ops=1_000_000, runs=5)
    best: dict[str, float] = {}
    with scratch() as folder:
        log = folder / "long.log"
        _, n_ops = write_long_log(RECORDED, log, n_ops=args.ops)
        print(f"{n_ops:,} ops, {log.stat().st_size / 1e6:.0f} MB of NDJSON")
        for _ in range(args.runs):
            seconds, peak = cost_of_instr("to-parquet", log, "-o", folder / "t", "--force")
            figures = {"to-parquet, CPU s": seconds, "to-parquet, peak MB resident": peak / 1e6}
            figures |= in_own_process(by_tables, log) | in_own_process(by_rows, log)
            for name, figure in figures.items():
                best[name] = min(figure, best.get(name, figure))
    for name, figure in best.items():
        print(f"{name:<50} {figure:6.2f}")
    ratio = best["rows of dicts, json.loads, CPU s"] / best["load_tables, CPU s"]
    print(f"rows of dicts / load_tables: {ratio:.1f}")


def by_tables(log: Path) -> dict[str, float]:
    begin = time.process_time()
    deque(read_events(log), maxlen=0)
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


def by_rows(log: Path) -> dict[str, float]:
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


if __name__ == "__main__":
    main()
