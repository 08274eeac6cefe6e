"""The rules: each looks for one cause of a slow session and returns it, or None."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from llamacpp_instr.converters.analyses.findings.facts import Facts, Finding
from llamacpp_instr.log.steps import device_times
from llamacpp_instr.model.types import BY_NAME, GgmlType
from llamacpp_instr.report.report import shown

WAITING = 0.2
"""share of the time of the steps"""
SMALL_BATCH, SPLIT = 64, 4
"""tokens of a batch of a prompt, and into how many batches it is split at least"""
REBUILT, REBUILT_COST = 0.5, 0.02
"""share of the graphs of decodes, and of the time of decodes"""
HELD_TWICE = 0.2
"""share of the bytes of the weights"""
NO_KERNEL = 0.2
"""share of the time in kernels"""
COLD = 0.05
"""share of the time of the steps"""
SAMPLING, INTERRUPTED = 0.1, 10
"""share of the time by the clock; so many times the median take tokens whose thread had no CPU"""
BANDWIDTH = 0.7
"""share of the measured bandwidth"""
APPLICATION, APPLICATION_NS, APPLICATION_TOKENS = 0.3, 500_000, 10
"""share of the time between tokens, ns of each of them, and how many at least"""

_REPACKED = ("CPU_REPACK", "CPU_AARCH64", "AMX")


def disturbed_machine(facts: Facts) -> Finding | None:
    """Other work took the CPU (`machine.DISTURBED`)."""
    machine = facts.machine
    if machine is None or not machine.is_disturbed or facts.n_threads > machine.cpus:
        return None
    return Finding(
        "disturbed-machine",
        f"The machine was disturbed: {machine.sentence()}.",
        machine.share,
        "the process's CPU time",
        "Stop the other work, or do not trust these speeds.",
    )


def too_many_threads(facts: Facts) -> Finding | None:
    """More threads than CPUs: at each barrier, the others wait for one that has no CPU."""
    cpus = facts.session.start.host.cores
    machine = facts.machine
    if not facts.is_crowded:
        return None
    return Finding(
        "too-many-threads",
        f"{facts.n_threads} threads share {cpus} CPUs, so threads wait for one that has no CPU.",
        machine.share if machine else 1 - cpus / facts.n_threads,
        "the process's CPU time",
        f"Use at most {cpus} threads (n_threads, --threads).",
    )


def waiting_threads(facts: Facts) -> Finding | None:
    """Thread 0 waits in barriers for the others (WAITING)."""
    if facts.n_threads < 2 or facts.lacks_cpus:
        return None
    waiting = 0
    on_device = device_times(facts.session)
    for ops in facts.account.ops:
        if ops.gap is not None:
            # between the parts of a graph, thread 0 waits for the device
            alone = [compute not in on_device for compute in ops.compute.tolist()]
            waiting += int(ops.gap[alone].sum(dtype=np.int64))
        if ops.wait is not None:
            waiting += int(ops.wait.sum(dtype=np.int64))
    share = waiting / facts.step_time
    if share < WAITING:
        return None
    return Finding(
        "waiting-threads",
        f"Threads wait for each other: thread 0 spent {shown(waiting, 'ns')} in barriers.",
        share,
        "the steps' time",
        f"Try fewer than {facts.n_threads} threads: the kernels are too small to share.",
    )


def small_batches(facts: Facts) -> Finding | None:
    """Prompts are computed in many small batches (SMALL_BATCH, SPLIT)."""
    begins, dur = facts.by_time["begin"], facts.by_time["end"] - facts.by_time["begin"]
    slow: set[int] = set()
    n_batches = n_tokens = 0
    for request in facts.requests:
        until = request.token_times[0] if request.token_times else request.end
        first = [i for i in request.steps if begins[i] < until]
        if len(first) >= SPLIT and request.prompt / len(first) < SMALL_BATCH:
            slow.update(first)
            n_batches += len(first)
            n_tokens += request.prompt
    cost = int(dur[sorted(slow)].sum())
    computes = facts.computes.rows(facts.computes["phase"] == "prefill")
    allowed = min((min(c.n_batch, c.n_ubatch) for c in facts.session.contexts.values()), default=0)
    step, at, parts = np.unique(computes["step"], return_inverse=True, return_counts=True)
    if not slow and len(step):
        small = (parts[at] >= SPLIT) & (computes["n_tokens"] < SMALL_BATCH)
        cost = int(computes["dur"][small].sum())
        n_batches, n_tokens = int(small.sum()), int(computes["n_tokens"][small].sum())
    if not cost:
        return None
    return Finding(
        "small-batches",
        f"Prompts are computed in small batches, {n_tokens / n_batches:.0f} tokens at a time; each"
        " batch reads every weight.",
        cost / facts.step_time,
        "the steps' time",
        "Raise n_batch and n_ubatch (--batch, --ubatch)."
        if allowed < 2 * n_tokens / n_batches
        else f"Pass more of a prompt at once: a batch can have {allowed:,} tokens.",
    )


def rebuilt_graphs(facts: Facts) -> Finding | None:
    """Decodes build a new graph nearly every time (REBUILT, REBUILT_COST)."""
    computes = facts.computes.rows(np.lexsort((facts.computes["t"], facts.computes["ctx"])))
    decode = computes["phase"] == "decode"
    # the first one after a prompt has to build
    after_decode = np.zeros(len(computes), np.bool_)
    after_decode[1:] = decode[:-1] & (computes["ctx"][1:] == computes["ctx"][:-1])
    decodes = computes.rows(decode & after_decode)
    steps = facts.steps.rows(facts.steps["phase"] == "decode")
    if len(decodes) < 10 or not len(steps):
        return None
    built = ~decodes["reused"]
    costs = decodes["build"] + decodes["alloc"]
    cost = int(costs.sum())
    if built.mean() < REBUILT:
        return None
    # medians, because a kernel that waits for a CPU makes some decodes many times as long
    usual = np.median(costs[built]) * built.mean()
    if usual < REBUILT_COST * np.median(steps["end"] - steps["begin"]):
        return None
    sizes = set(steps.tuples("n_seqs", "n_outputs"))
    return Finding(
        "rebuilt-graphs",
        f"{int(built.sum()):,} of {len(decodes):,} decodes built a new graph, which took"
        f" {shown(cost, 'ns')}.",
        cost / facts.step_time,
        "the steps' time",
        "Keep the number of sequences and outputs of a batch the same, so that graphs are reused."
        if len(sizes) > 1
        else "Batches kept their size: look for adapters or samplers that change between decodes.",
    )


def weights_held_twice(facts: Facts) -> Finding | None:
    """Weights were repacked from a mapped file, whose pages stay in memory too (HELD_TWICE).
    llama.cpp unmaps only what lies before and after the weights that it uses in place."""
    tensors = facts.session.tensors
    total = sum(tensor.bytes for tensor in tensors)
    repacked = sum(t.bytes for t in tensors if t.buffer.startswith(_REPACKED))
    mapped = any(t.buffer.endswith("_Mapped") for t in tensors)
    if not mapped or not total or repacked / total < HELD_TWICE:
        return None
    return Finding(
        "held-twice",
        f"Up to {shown(repacked, 'bytes')} of weights are in memory twice: repacked, and mapped"
        " from the file.",
        repacked / total,
        "the weights' bytes",
        "If memory is short: load without mmap, or without repacking.",
    )


def no_interleaved_kernel(facts: Facts) -> Finding | None:
    """Some types were repacked for faster kernels, and one that costs much was not (NO_KERNEL)."""
    tensors = facts.session.tensors
    repacked = {t.type for t in tensors if t.buffer.startswith(_REPACKED)}
    if not repacked:
        return None
    spent: dict[str, dict[str | None, int]] = defaultdict(lambda: defaultdict(int))
    total = 0
    for ops in facts.account.ops:
        kernels = facts.session.kernels(ops.plan)
        total += int(ops.totals.sum())
        ns = ops.dur.sum(axis=0, dtype=np.int64).tolist()
        weights = zip(kernels.label, kernels.weight, kernels.weight_type, ns, strict=True)
        for label, name, of, took in weights:
            if label.startswith("MUL_MAT") and of is not None and of not in repacked:
                spent[of][name] += took
    kind = max(spent, key=lambda of: sum(spent[of].values()), default="")
    cost = sum(spent[kind].values())
    if not kind or cost / max(total, 1) < NO_KERNEL:
        return None
    rows = {t.ne[0] for t in tensors if t.type == kind and t.ne and t.name in spent[kind]}
    best = _interleaved(kind, repacked, rows)
    return Finding(
        "no-interleaved-kernel",
        f"Weights of {kind} have no interleaved kernel on this machine;"
        f" {', '.join(sorted(repacked))} have one.",
        cost / total,
        "the kernels' time",
        f"Quantize these tensors to {best} and compare speed and errors (instr compare)."
        if best
        else "No type with one has blocks that divide the rows of these tensors.",
    )


def _interleaved(kind: str, repacked: set[str], rows: set[int]) -> GgmlType | None:
    """The repacked type nearest in size to `kind` whose blocks divide the rows. Otherwise Q4_0,
    which ggml interleaves wherever it interleaves another type, or None if that does not fit."""
    for names in (sorted(repacked), {"q4_0"} - {kind}):
        types = [BY_NAME[name.upper()] for name in names if name.upper() in BY_NAME]
        if fitting := [of for of in types if all(row % of.block == 0 for row in rows)]:
            bits = BY_NAME[kind.upper()].bits_per_weight if kind.upper() in BY_NAME else 0.0
            return min(fitting, key=lambda of: abs(of.bits_per_weight - bits))
    return None


def cold_start(facts: Facts) -> Finding | None:
    """The first step took much longer than others of its kind, with page faults (COLD)."""
    steps = facts.steps.rows(np.argsort(facts.steps["begin"], kind="stable"))
    faults = steps["minflt"] + steps["majflt"]
    if len(steps) < 3 or faults[0] < 100 or faults[0] < 4 * max(np.median(faults[1:]), 1):
        return None
    dur = steps["end"] - steps["begin"]
    alike = (steps["phase"] == steps["phase"][0]) & (steps["n_tokens"] == steps["n_tokens"][0])
    alike[0] = False
    if not alike.any():
        return None
    extra = int(dur[0] - np.median(dur[alike]))
    if extra / facts.step_time < COLD:
        return None
    mapped = any(t.buffer.endswith("_Mapped") for t in facts.session.tensors)
    return Finding(
        "cold-start",
        f"The first step took {shown(extra, 'ns')} longer than others like it, with"
        f" {int(steps['minflt'][0]):,} minor and {int(steps['majflt'][0]):,} major page faults.",
        extra / facts.step_time,
        "the steps' time",
        "Run one step before it counts" + (", or load without mmap." if mapped else "."),
    )


def costly_sampling(facts: Facts) -> Finding | None:
    """The samplers take a large part of the time (SAMPLING), also without interruptions
    (INTERRUPTED)."""
    tokens = facts.session.tokens
    dur = tokens["dur"][np.isin(tokens["step"], facts.steps["step"])]
    if not dur.any() or facts.lacks_cpus:
        return None
    own = float(np.minimum(dur, INTERRUPTED * np.median(dur)).sum() / dur.sum())
    sampling = facts.clock.sampling * own
    share = sampling / (facts.clock.total - facts.clock.sampling + sampling)
    if share < SAMPLING:
        return None
    model = ", more than the model" * (sampling > facts.clock.steps)
    return Finding(
        "costly-sampling",
        f"Sampling takes {shown(sampling / len(dur), 'ns')} a token{model}.",
        share,
        "the time by the clock",
        "Put top-k first in the sampler chain; grammars cost most.",
    )


def slow_application(facts: Facts) -> Finding | None:
    """Between the tokens of requests, the application takes much of the time (APPLICATION, and
    APPLICATION_NS on average of APPLICATION_TOKENS or more)."""
    if facts.lacks_cpus:
        return None
    between = sum(int(request.between_tokens.sum()) for request in facts.requests)
    begins = np.sort(facts.steps["begin"])
    ends = np.sort(facts.steps["end"])
    outside = n = 0
    tokens = facts.session.tokens
    samplers = dict(
        zip((tokens["t"] + tokens["dur"]).tolist(), tokens["dur"].tolist(), strict=True)
    )
    for request in facts.requests:
        times = np.array(request.token_times, np.int64)
        if len(times) < 2:
            continue
        # a step begins after one token and ends before the next
        first = np.searchsorted(begins, times[:-1])
        last = np.searchsorted(ends, times[1:], side="right") - 1
        whole = last >= first
        first, last, until = first[whole], last[whole], times[1:][whole]
        sampling = sum(samplers.get(t, 0) for t in until.tolist())
        outside += int((begins[first] - times[:-1][whole]).sum()) + int((until - ends[last]).sum())
        outside -= sampling
        n += len(until)
    if n < APPLICATION_TOKENS or outside / between < APPLICATION or outside / n < APPLICATION_NS:
        return None
    return Finding(
        "slow-application",
        f"Between tokens, {shown(outside, 'ns')} pass outside of llama.cpp.",
        outside / between,
        "the time between tokens",
        "Profile the application: what it does with a token delays the next.",
    )


def memory_bound(facts: Facts) -> Finding | None:
    """Decodes read their weights nearly as fast as memory can give them (BANDWIDTH)."""
    if facts.probe is None:
        return None
    decodes = facts.computes.rows(facts.computes["phase"] == "decode")
    threads = dict(decodes.tuples("compute", "n_threads"))
    spent = moved = 0
    least = 0.0
    """ns that the roof allows"""
    for ops in facts.account.ops:
        moved_by = facts.session.work(ops).of_computes().bytes.tolist()
        for compute, n_bytes, ns in zip(
            ops.compute.tolist(), moved_by, ops.totals.tolist(), strict=True
        ):
            if compute in threads:
                roof = facts.probe.bandwidth_of(threads[compute], n_bytes).bytes_per_second
                spent += ns
                moved += n_bytes
                least += n_bytes / roof * 1e9
    if not spent or least / spent < BANDWIDTH:
        return None
    rate = shown(moved / spent * 1e9, "bytes_per_second")
    return Finding(
        "memory-bound",
        f"Decoding is bound by memory: kernels move {rate} a second, {100 * least / spent:.0f} % of"
        " what `instr probe` measured.",
        spent / facts.step_time,
        "the steps' time",
        "Only fewer bytes help: several sequences in a batch, or a smaller type of weights, whose"
        " errors `instr quality` shows.",
    )


Rule = Callable[[Facts], Finding | None]
RULES: tuple[Rule, ...] = (
    disturbed_machine,
    too_many_threads,
    waiting_threads,
    small_batches,
    rebuilt_graphs,
    weights_held_twice,
    no_interleaved_kernel,
    cold_start,
    costly_sampling,
    slow_application,
    memory_bound,
)
"""Names of rules never change; add new ones at the end."""
