"""Logs of known speeds: runs of equal steps, with noise of a known size."""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random

import numpy as np

from llamacpp_instr.log import schema as s
from tests.kit.made_log import encode, make_log

KERNEL_NS = {"MUL_MAT": 40_000, "FLASH_ATTN_EXT": 20_000}
N_RUNS, N_DECODES = 6, 20


def steady_log(seed: int, noise: float = 0.0, fused: bool = False) -> list[s.Event]:
    """Runs of decodes of a small Llama on one graph, each kernel with its own time; `noise` is the
    deviation of log(time) of a whole run and, independently, of each kernel."""
    made = make_log(Random(3).randint, n_contexts=1, level="detailed")
    graph = next(event for event in made if isinstance(event, s.Graph))
    draw = np.random.default_rng(seed)
    events = [e for e in made if isinstance(e, (s.SessionStart, s.Model, s.Tensor, s.Context))]
    assert isinstance(events[0], s.SessionStart)
    events[0].id = f"{seed:016x}"
    nodes = graph.nodes
    assert nodes is not None
    kernels = [i for i, one in enumerate(nodes.exec) if one]
    counts = [1] * len(kernels)
    if fused:
        parts = [i for i in kernels if nodes.op[i] == "MUL" and nodes.op[i - 1] == "RMS_NORM"]
        kernels = [i for i in kernels if i not in parts]
        counts = [2 if i + 1 in parts else 1 for i in kernels]
    ns = [KERNEL_NS.get(nodes.op[k], 5000) * n for k, n in zip(kernels, counts, strict=True)]
    t = graph.t
    plan = s.Plan(t=t, plan=0, graph=graph.graph, node=kernels, n=counts)
    events += [graph, plan]
    for run in range(N_RUNS):
        factors = np.exp(draw.normal(0, noise) + draw.normal(0, noise, (N_DECODES, len(ns))))
        durations = (np.rint(ns * factors).astype(int) * 100).tolist()
        events.append(s.Mark(t=t, mark=run, name=f"run {run + 1}", phase="begin"))
        for i, dur in enumerate(durations):
            step = run * N_DECODES + i
            events.append(s.StepBegin(t=t, step=step, ctx=0, kind="decode", phase="decode",
                n_tokens=1, n_outputs=1, n_seqs=1, pos=1 + i))  # fmt: skip
            events.append(s.Compute(t=t, compute=step, graph=graph.graph, ctx=0, step=step,
                source="decode", reused=step > 0, n_threads=1, dur=sum(dur)))  # fmt: skip
            events.append(s.Ops(t=t, compute=step, plan=0, dur=dur))
            events.append(s.Layers(t=t, compute=step, layer=[0], dur=[sum(dur)]))
            t += sum(dur)
            events.append(s.StepEnd(t=t, step=step, status=0, n_ubatch=1, n_reused=1, prepare=0,
                readback=0))  # fmt: skip
        events.append(s.Mark(t=t, mark=run, name=f"run {run + 1}", phase="end"))
    return events


def scaled(events: list[s.Event], op: str, factor: float) -> list[s.Event]:
    """The log with the durations of one op multiplied; steps and layers stay as they are."""
    changed = [copy.copy(event) for event in events]
    plans = {e.plan: e for e in changed if isinstance(e, s.Plan)}
    graphs = {e.graph: e for e in changed if isinstance(e, s.Graph)}
    for event in changed:
        if isinstance(event, s.Ops):
            nodes = graphs[plans[event.plan].graph].nodes
            assert nodes is not None
            names = [nodes.op[i] for i in plans[event.plan].node]
            event.dur = [round(d * factor) if n == op else d
                         for d, n in zip(event.dur, names, strict=True)]  # fmt: skip
    return changed


def slowed(events: list[s.Event], factor: float) -> list[s.Event]:
    """The log with every step longer by a factor."""
    changed, late = [copy.copy(event) for event in events], 0.0
    begin = 0
    for event in changed:
        event.t += round(late)
        if isinstance(event, s.StepBegin):
            begin = event.t
        elif isinstance(event, s.StepEnd):
            more = (event.t - begin) * (factor - 1)
            event.t += round(more)
            late += more
    return changed


def write(path: Path, events: list[s.Event]) -> Path:
    path.write_bytes(encode(events))
    return path


def group(directory: Path, name: str, seeds: range, factor: float, spread: float) -> list[Path]:
    """Logs of processes whose speeds differ randomly, and by `factor`."""
    paths = []
    for seed in seeds:
        of_process = factor * (1 + spread * Random(seed).uniform(-1, 1))
        log = slowed(steady_log(seed, noise=0.01), of_process)
        paths.append(write(directory / f"{name}{seed}.log", log))
    return paths
