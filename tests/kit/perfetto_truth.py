"""What a trace of a log has to say, worked out from the log's JSON in the plainest way."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

from tests.kit.perfetto_queries import ROWS

Row = tuple[Any, ...]
MEMORY = "memory_update"


@dataclass
class Truth:
    """What is in a log."""

    rows: dict[str, list[Row]] = field(
        default_factory=lambda: {name: [] for name in (*ROWS, "rates")}
    )
    """sorted, with the columns that the queries of these names ask for"""
    gaps: Counter[int] = field(default_factory=Counter)
    """by thread: time between its kernels and after them"""
    n_edges: int = 0
    """reads of another kernel's result, all computes together"""
    n_taken: int = 0
    """tokens that a decode took"""
    n_served: int = 0
    """sequences of steps that count: each belongs to one request"""


def truth(events: list[dict[str, Any]]) -> Truth:
    """Goes through the events once, in their order."""
    found = Truth()
    graphs: dict[int, Any] = {}
    plans: dict[int, Any] = {}
    begins: dict[int, Any] = {}
    computed: dict[int, Any] = {}
    ended: dict[int, int] = {}
    marked: dict[int, Any] = {}
    sampled: Counter[int] = Counter()
    results = result_times(events)
    warm_ups: set[int] = set()
    prompts: dict[int, int] = {}
    for e in events:
        kind = e["event"]
        add_facts(found, e, marked, events[0]["host"]["cores"])
        if kind == "graph":
            graphs[e["graph"]] = e
        elif kind == "plan":
            plans[e["plan"]] = e
        elif kind == "step_begin":
            begins[e["step"]] = e
            if any(mark["name"] == "warm-up" for mark in marked.values()):
                warm_ups.add(e["step"])
            if e["phase"] == "decode" and e.get("pos", -1) != 0:
                found.n_taken += min(sampled[e["ctx"]], e["n_tokens"])
            sampled[e["ctx"]] = 0
        elif kind == "kv" and e["op"] == "seq_add" and e["arg"] < 0 and e["ctx"] in prompts:
            # a context shift: what was behind the prompt's end may lie before it now
            end = prompts[e["ctx"]]
            prompts[e["ctx"]] = min(end, max(end, e["p0"]) + e["arg"])
        elif kind == "step_end":
            b = begins[e["step"]]
            name = phase_of(b, prompts)
            end = results[e["step"]]
            dur = end - b["t"]
            if e["status"] == 0 and e["step"] not in warm_ups:
                found.n_served += len(b.get("seq") or [0] * (b["n_seqs"] == 1))
            found.rows["steps"].append((b["t"], dur, name, b["step"], b["n_tokens"], e["status"]))
            found.rows["faults"].append((b["t"], e.get("minflt", 0)))
            found.rows["major_faults"].append((b["t"], e.get("majflt", 0)))
            found.rows["faults"].append((end, 0))
            found.rows["major_faults"].append((end, 0))
            computes = [c for c in computed.values() if c.get("step", -1) == b["step"]]
            found.rows["phases"] += step_phases(b, e, computes)
            ended[b["step"]] = end
            if dur:
                found.rows["rates"].append((b["t"], b["n_tokens"] / (dur / 1e9)))
        elif kind == "token":
            p = e.get("p")
            found.rows["tokens"].append((e["t"], e["dur"], e["text"], e["id"], p))
            if e.get("step", -1) in ended:
                begin = begins[e["step"]]["t"]
                text = json.dumps(e["text"], ensure_ascii=False)
                found.rows["texts"].append((begin, ended[e["step"]] - begin, text))
            sampled[e["ctx"]] += 1
        elif kind == "compute":
            computed[e["compute"]] = e
            now = e["t"]
            for name in ("apply", "build", "alloc", "inputs"):
                if dur := e.get(name, 0):
                    found.rows["phases"].append((now, dur, name))
                    now += dur
            found.rows["phases"].append((e["t"] + e.get("start", 0), e["dur"], "compute"))
        elif kind == "splits":
            known = graphs[computed[e["compute"]]["graph"]]["splits"]
            beside = zip(e["split"], e["asynchronous"], strict=True)
            for begin, dur, (split, asynchronous) in intervals(e, beside):
                name = ("submit to " if asynchronous else "") + known[split]["backend"]
                found.rows["splits"].append((begin, dur, name, split))
        elif kind == "layers":
            for begin, dur, layer in intervals(e, e["layer"]):
                name = f"layer {layer}" if layer >= 0 else "no layer"
                found.rows["layers"].append((begin, dur, name))
        elif kind == "ops":
            plan = plans[e["plan"]]
            nodes = graphs[plan["graph"]]["nodes"]
            counts = plan.get("n") or [1] * len(plan["node"])
            insides = [
                [i for i in range(first, first + n) if nodes["exec"][i]]
                for first, n in zip(plan["node"], counts, strict=True)
            ]
            names = ["+".join(nodes["op"][i] for i in inside) for inside in insides]
            waits = e.get("wait") or [None] * len(names)
            rows = list(intervals(e, zip(names, insides, waits, strict=True)))
            if e.get("thread", 0) == 0:
                for begin, dur, (name, inside, _) in rows:
                    last = inside[-1]
                    shape = f"{nodes['type'][last]} {nodes['ne'][last]}"
                    found.rows["ops"].append((begin, dur, name, nodes["name"][last], shape))
                    for arg, value in op_args(graphs[plan["graph"]], inside):
                        found.rows["args"].append((begin, arg, value))
                        if arg == "weight" and name != "ROPE":
                            role = re.sub(r"^(enc\.|dec\.)?blk\.\d+\.|\.weight$", "", value)
                            found.rows["titles"].append((begin, f"{name} {role}"))
                    if name == "MUL_MAT":
                        found.rows["work"].append(
                            (begin, *product_work(graphs[plan["graph"]], last))
                        )
                found.n_edges += count_edges(nodes, insides)
            if "wait" in e:
                thread = e.get("thread", 0)
                for begin, dur, (name, _, wait) in rows:
                    found.rows["threads"].append((thread, begin, dur, name, wait))
                if "gap" in e:
                    found.gaps[thread] += sum(e["gap"][1:]) + e.get("tail", 0)
    for column in found.rows.values():
        column.sort(key=lambda row: tuple(map(str, row)))
    return found


def result_times(events: list[dict[str, Any]]) -> dict[int, int]:
    """When the result of each step was ready: at its end, or after the longest wait for a device
    before the next step of its context."""
    found: dict[int, int] = {}
    latest: dict[int, int] = {}
    for e in events:
        if e["event"] == "step_begin":
            latest[e["ctx"]] = e["step"]
        elif e["event"] == "step_end":
            found[e["step"]] = max(found.get(e["step"], 0), e["t"])
        elif e["event"] == "sync" and e["dur"] >= 20_000 and e["ctx"] in latest:
            step = latest[e["ctx"]]
            found[step] = max(found.get(step, 0), e["t"] + e["dur"])
    return found


def add_facts(found: Truth, e: dict[str, Any], marked: dict[int, Any], cores: int) -> None:
    """What an event says on its own, whatever the others are; `marked` are the open marks."""
    t = e["t"]
    match e["event"]:
        case "model":
            name = e.get("name") or e["path"].split("/")[-1]
            found.rows["loads"].append((t, e["dur"], name, e["arch"], e["params"], e["bytes"]))
        case "mark":
            if e["phase"] == "begin":
                marked[e["mark"]] = e
            else:
                begin = marked.pop(e["mark"]) if e["phase"] == "end" else e
                found.rows["marks"].append((begin["t"], t - begin["t"], begin["name"], e["mark"]))
        case "note":
            found.rows["messages"].append((t, e["name"], compact(e["data"])))
        case "message":
            found.rows["messages"].append((t, e["level"], e["text"]))
        case "kv":
            found.rows["kv"].append((t, e["used"]))
            found.rows["kv_bytes"].append((t, e.get("bytes", 0)))
            if e["op"] != "apply":
                fields = (e.get(name) for name in ("seq", "seq_dst", "p0", "p1", "arg"))
                found.rows["kv_changes"].append((t, f"KV {e['op']}", *fields))
        case "memory":
            for use in e["buffers"]:
                for kind in ("model", "context", "compute"):
                    found.rows["memory"].append((t, f"{use['buffer']} {kind}", use.get(kind, 0)))
            if e.get("rss"):
                found.rows["memory"].append((t, "resident memory", e["rss"]))
        case "sync":
            found.rows["syncs"].append((t, e["dur"]))
        case "machine":
            values = {"load": e.get("load")}
            if "delay" in e:
                # the delay counts up to the time of other processes, less one tick
                others = e["busy"] - e["cpu"] - 10_000_000 if "busy" in e else e["delay"]
                taken = min(e["delay"], max(others, 0))
                # so does the stolen time of all CPUs, by the share of them that the process used
                used = (e["cpu"] + taken) / (max(e["dur"], 1) * max(cores, 1))
                taken += e.get("steal", 0) * min(used, 1)
                values["waiting for a CPU"] = 100 * (taken / max(taken + e["cpu"], 1))
            for name, value in values.items():
                if value is not None:
                    found.rows["machine"] += [(max(t - e["dur"], 0), name, value), (t, name, 0)]
        case "tensor_stats":
            names = ("name", "layer", "n", "min", "max", "mean", "std", "nan", "inf", "zero")
            values = {"layer": -1, **e}
            found.rows["values"] += [
                (t, f"{e['name']} {name}", e[name])
                for name in ("min", "max", "mean", "std")
                if name in e
            ]
            found.rows["stats"] += [(t, name, values[name]) for name in names if name in values]


def compact(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def step_phases(begin: dict[str, Any], end: dict[str, Any], computes: list[Any]) -> list[Row]:
    """What a step does before its first ubatch and after its last; a memory update counts as
    before."""
    rows = []
    if end["prepare"]:
        ubatches = [compute["t"] for compute in computes if compute["source"] != MEMORY]
        first = min(ubatches, default=end["t"])
        rows.append((begin["t"], min(end["prepare"], first - begin["t"]), "prepare"))
    if end["readback"]:
        last = computes[-1]
        since = last["t"] + last.get("start", 0) + last["dur"]
        rows.append((since, min(end["readback"], end["t"] - since), "readback"))
    return rows


def op_args(graph: dict[str, Any], inside: list[int]) -> list[tuple[str, Any]]:
    """What an op's slice must say about the kernel that computes the nodes `inside`."""
    nodes, leafs = graph["nodes"], graph["leafs"]
    first, last = inside[0], inside[-1]
    args = [("op", "+".join(nodes["op"][i] for i in inside)), ("layer", nodes["layer"][first])]
    reads = [s for i in inside for s in nodes["src"][i] if s not in inside]
    for i, s in enumerate(reads):
        name, type_, ne = (
            (nodes["name"][s], nodes["type"][s], nodes["ne"][s])
            if s >= 0
            else (leafs[-1 - s]["name"], leafs[-1 - s]["type"], leafs[-1 - s]["ne"])
        )
        args.append((f"source_{i}", f"{name} {type_} {ne}"))
    weights = [leafs[-1 - s] for s in reads if s < 0 and leafs[-1 - s].get("tensor", -1) >= 0]
    if weights:
        args += [("weight", weights[0]["name"]), ("weight_type", weights[0]["type"])]
    if len(inside) > 1:
        fused = (f"{nodes['op'][i]} {nodes['name'][i]}" for i in inside[1:])
        args.append(("fused_with", ", ".join(fused)))
    args += [
        ("backend", split["backend"])
        for split in graph["splits"]
        if split["start"] <= first < split["end"]
    ]
    if nodes["buffer"][last] >= 0:
        args.append(("buffer", graph["buffers"][nodes["buffer"][last]]))
    for i in inside:
        words = (nodes["params"][i] + 16 * [0])[:16]
        if nodes["op"][i] in ("NORM", "RMS_NORM", "L2_NORM"):
            args.append(("eps", as_float(words[0])))
        elif nodes["op"][i] in ("SOFT_MAX", "FLASH_ATTN_EXT"):
            args.append(("scale", as_float(words[0])))
        elif nodes["op"][i] == "ROPE":
            args += [("n_dims", words[1]), ("freq_base", as_float(words[5]))]
    return args


def as_float(word: int) -> float:
    """ggml keeps its parameters as int32 that may have the bits of a float."""
    return struct.unpack("<f", struct.pack("<i", word))[0]


def phase_of(begin: dict[str, Any], prompts: dict[int, int]) -> str:
    """A token that goes back behind the prompt is one of a prompt. `prompts` has the end of the
    last one of each context."""
    ctx, pos = begin["ctx"], begin.get("pos", -1)
    if begin["kind"] == "encode":
        return "encode"
    if begin["phase"] == "prefill" or 0 <= pos < prompts.get(ctx, 0):
        prompts[ctx] = pos + begin["n_tokens"]
        return "prefill"
    return "decode"


def product_work(graph: dict[str, Any], node: int) -> tuple[int, int]:
    """Floating-point operations and bytes of MUL_MAT: a dot product for each element of the
    result; the elements of both sources are read, the result is written."""
    nodes, leafs = graph["nodes"], graph["leafs"]
    flops, moved = 2, nodes["bytes"][node]
    for s in nodes["src"][node]:
        of = {key: nodes[key][s] for key in ("type", "ne", "bytes")} if s >= 0 else leafs[-1 - s]
        whole = prod(of["ne"]) * {"f32": 4, "f16": 2}.get(of["type"], 0)
        moved += min(whole or of["bytes"], of["bytes"])
    left = nodes["src"][node][0]
    flops *= (nodes["ne"][left] if left >= 0 else leafs[-1 - left]["ne"])[0]
    for n in nodes["ne"][node]:
        flops *= n
    return flops, moved


def intervals(event: dict[str, Any], beside: Any) -> Any:
    """(begin, duration, value of `beside`) of an event's `gap` and `dur`."""
    now = event["t"]
    gaps = event.get("gap") or [0] * len(event["dur"])
    for gap, dur, what in zip(gaps, event["dur"], beside, strict=True):
        yield now + gap, dur, what
        now += gap + dur


def count_edges(nodes: dict[str, Any], insides: list[list[int]]) -> int:
    """Pairs of kernels of which the later one reads what the earlier one made."""
    maker = {node: i for i, inside in enumerate(insides) for node in inside}
    pairs = set()
    for i, inside in enumerate(insides):
        for node in inside:
            for source in nodes["src"][node]:
                while source >= 0 and not nodes["exec"][source]:
                    source = nodes["src"][source][0] if nodes["src"][source] else -1
                if source in maker and maker[source] < i:
                    pairs.add((maker[source], i))
    return len(pairs)
