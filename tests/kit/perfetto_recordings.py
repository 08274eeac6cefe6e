"""Logs of real sessions, and one that is made up for what needs a device."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from random import Random

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.columns import kernel_times
from llamacpp_instr.log.graph.kernels import runs
from tests.kit.made_log import encode, make_log
from tests.kit.native_kit import DEMO, ROOT, random_model, run_probe

APPLICATION = """
import sys, threading
import llama_cpp.llama_cpp as api
from llama_cpp import Llama
import llamacpp_instr

with llamacpp_instr.record(sys.argv[2], level="verbose") as session:
    model = Llama(sys.argv[1], n_ctx=64, n_threads=2, verbose=False)
    memory = api.llama_get_memory(model.ctx)
    started, ended = threading.Event(), threading.Event()

    def retrieve():
        with session.mark("retrieval"):
            started.set()
            ended.wait()

    thread = threading.Thread(target=retrieve)
    with session.mark("turn"):
        thread.start()
        started.wait()
        session.instant("asked")
        model.eval(list(range(1, 31)))
    # the first mark has ended, the second goes on
    with session.mark("turn"):
        session.note("documents", {"found": 3, "text": "ünïcödé"})
        # a context shift: forget four tokens, move the others to their place
        api.llama_memory_seq_rm(memory, 0, 4, 8)
        api.llama_memory_seq_add(memory, 0, 8, -1, -4)
        model.n_tokens -= 4
        model.eval([5])
        ended.set()
        thread.join()
    # a position that is not the next: llama.cpp says why it refuses
    batch = api.llama_batch_init(1, 0, 1)
    batch.n_tokens = 1
    batch.token[0], batch.pos[0], batch.n_seq_id[0], batch.seq_id[0][0] = 1, 3, 1, 0
    api.llama_decode(model.ctx, batch)
    api.llama_batch_free(batch)
    api.llama_memory_clear(memory, True)
    model.close()
"""


def record(name: str, level: str, models: Path, folder: Path) -> Path:
    """Records the session of that name at that level; the log in `folder`.

    `application` uses llama_cpp itself, `stats` is the command with values of tensors, `device`
    is made up; everything else is a model that computes a prompt and some tokens.
    """
    log = folder / "session.log"
    if name == "application":
        script = [sys.executable, "-c", APPLICATION, str(DEMO), str(log)]
        subprocess.run(script, cwd=ROOT, check=True, capture_output=True)
    elif name in ("stats", "bert", "sampled"):
        model = models / "bert.gguf" if name == "bert" else DEMO
        more = {"bert": ["--embed"], "stats": ["--stats", "^(Qcur|l_out)-0$", "-n", "3"]}
        command = ["run", model, "--prompt", "Once upon a time", "--level", level, "--log", log]
        command += more.get(name, ["-n", "40", "--ctx", "64", "--temp", "0.8", "--seed", "1"])
        subprocess.run(
            [sys.executable, "-m", "llamacpp_instr", *map(str, command)],
            cwd=ROOT, check=True, capture_output=True,
        )  # fmt: skip
    elif name == "device":
        log.write_bytes(encode(device_log()))
    else:
        tiny = models / f"{name}.gguf"
        model = DEMO if name == "demo" else tiny if tiny.exists() else random_model(name)
        run_probe(folder / "out.npz", model, "--threads", "2", "--level", level, "--log", str(log))
    return log


def device_log() -> list[s.Event]:
    """A session on two backends: splits that a device only takes over, waits for it, a cold start,
    and a hypervisor that steals.

    This machine need not have a device; the numbers are as one would give them.
    """
    events: list[s.Event] = []
    computes: dict[int, s.Compute] = {}
    n_faults = half = n_kernels = 0
    of_kernels: list[int] = []
    layers = s.Layers(t=0, compute=0, layer=[], dur=[])
    for event in make_log(Random(11).randint, n_contexts=1, level="detailed"):
        if isinstance(event, s.Graph):
            half, nodes = event.n_nodes // 2, event.whole
            event.splits = [
                s.Split(start=0, end=half, backend="CPU"),
                s.Split(start=half, end=event.n_nodes, backend="CUDA0"),
            ]
        elif isinstance(event, s.Plan):  # that of the CPU
            ends = [node + n for node, n in zip(event.node, event.counts, strict=True)]
            n_kernels = sum(end <= half for end in ends)
            event.node, event.n = event.node[:n_kernels], event.n and event.n[:n_kernels]
            of_kernels = [nodes.layer[node] for node in event.node]
        elif isinstance(event, s.Ops):
            event.gap, event.dur = event.gap and event.gap[:n_kernels], event.dur[:n_kernels]
            begins, ends = (times.tolist() for times in kernel_times(event))
            spans = [(begins[first], ends[end - 1]) for _, first, end in runs(of_kernels)]
            layers.layer = [layer for layer, _, _ in runs(of_kernels)]
            layers.dur = [end - begin for begin, end in spans]
            layers.gap = [0, *(b - e for (_, e), (b, _) in pairwise(spans))]
        elif isinstance(event, s.Compute):
            computes[event.compute] = event
        elif isinstance(event, s.StepEnd):
            n_faults += 3
            event.majflt = n_faults
            events.append(s.Sync(t=event.t - 7, ctx=0, dur=5))
        elif isinstance(event, s.Machine):
            event.steal = event.dur // 3
        events.append(event)
        if isinstance(event, s.Layers):
            layers = event
            compute = computes[event.compute]
            part = compute.dur // 4
            splits = s.Splits(
                t=compute.t + compute.start, compute=event.compute,
                split=[0, 1], gap=[0, part], dur=[2 * part, part // 2], asynchronous=[0, 1],
            )  # fmt: skip
            events.append(splits)
    return events
