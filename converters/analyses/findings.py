"""What made a session slow, in words: at most five findings, the costliest first.

Invariant: a finding is silent unless its own figure in the log exceeds a limit that its rule names.
Nothing is guessed from the machine's name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.clock import compute_clock, compute_machine
from llamacpp_instr.converters.analyses.device_causes import (
    Cause,
    caller_waits,
    cpu_between,
    device_waits,
    layers_still_fit,
)
from llamacpp_instr.converters.analyses.machines import graph_again, slow_link, slow_machine
from llamacpp_instr.converters.analyses.serving import ADVICE, cost_by_reason, missed_prompts
from llamacpp_instr.converters.analyses.tables import header
from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import Table
from llamacpp_instr.log.steps import Account, device_times
from llamacpp_instr.log.waits import waits_of
from llamacpp_instr.model.types import BY_NAME, INTERLEAVED, GgmlType
from llamacpp_instr.prediction.probe.file import Probe
from llamacpp_instr.report.report import Cell, Figures, Report, shown

MOST = 5
BUSY = 0.5
"""load per CPU above which a probe is not used"""


class Finding(NamedTuple):
    """One cause, with its figure."""

    rule: str
    """a name that does not change"""
    what: str
    share: float
    of: str
    """what the share is of"""
    advice: str


class Facts:
    """A session and what several rules ask for, computed once; times in ns. `account` is of the
    steps that count."""

    def __init__(self, account: Account, probe: Probe | None = None) -> None:
        self.account = account
        self.session, self.steps = session, steps = account.session, account.steps
        self.by_time, self.requests = find_requests(session)
        """`steps` in order of time, as the requests name them"""
        self.step_time = max(int(account.total.sum()), 1)
        self.clock = compute_clock(session, steps)
        self.machine = compute_machine(session, steps)
        computes = session.computes.rows(np.isin(session.computes["step"], steps["step"]))
        phases = steps["phase"][list(account.row.values())]
        self.computes = Table(computes.columns | {"phase": phases})
        """those of `steps`, with the column `phase`"""
        self.n_threads = int(computes["n_threads"].max(initial=0))
        """the most that a compute used"""
        host = session.start.host
        self.is_crowded = 0 < host.cores < self.n_threads
        """whether threads share CPUs, so that what one does takes long because another runs"""
        disturbed = self.machine is not None and self.machine.is_disturbed
        self.lacks_cpus = self.is_crowded or disturbed
        """whether threads share CPUs, with each other or with other work"""
        # on a busy machine a probe is too low
        fits = probe and probe.cpu == host.cpu and probe.load <= BUSY * probe.cores
        self.probe = probe if fits else None


def find_causes(facts: Facts) -> list[Finding]:
    """The findings, the largest share first."""
    if not len(facts.steps):
        return []
    found = [
        Finding(name, cause[0], cause[1], of, cause[2])
        for name, of, rule in RULES
        if (cause := rule(facts)) is not None
    ]
    return sorted(found, key=lambda finding: -finding.share)[:MOST]


def compute_findings(facts: Facts) -> Report:
    found = find_causes(facts)
    rows: list[list[Cell]] = [[of.of, of.share, f"{of.what} {of.advice}"] for of in found]
    figures: Figures = {finding.rule: (finding.share, "fraction") for finding in found}
    columns = header("Costs", ("fraction", "share"), "why, and what to try")
    return Report("Findings", columns, rows, figures=figures)


# --- the rules ---

WAITING = 0.2
"""share of the time of the steps"""
SLOW, PARTS = 0.2, 5
"""share of the fast threads' time in products, and parts of equal numbers of computes"""
SMALL_BATCH, SPLIT = 64, 4
"""tokens of a batch of a prompt, and the least number of batches into which it is split"""
REBUILT, REBUILT_COST = 0.5, 0.02
"""share of the graphs of decodes, and of the time of decodes"""
HELD_TWICE = 0.2
"""share of the bytes of the weights"""
NO_KERNEL = 0.2
"""share of the time in kernels"""
COLD = 0.05
"""share of the time of the steps"""
SAMPLING, INTERRUPTED = 0.1, 10
"""share of the time by the clock; a token that takes this many medians had no CPU for a while"""
MISSED = 0.05
"""share of the time of the steps"""
BANDWIDTH = 0.7
"""share of the measured bandwidth"""
APPLICATION, APPLICATION_NS, APPLICATION_TOKENS = 0.3, 500_000, 10
"""share of the time between tokens, ns per token, and the least number of tokens"""


def disturbed_machine(facts: Facts) -> Cause:
    """Other work took the CPU (`machine.DISTURBED`)."""
    machine = facts.machine
    if machine is None or not machine.is_disturbed or facts.n_threads > machine.cpus:
        return None
    what = f"The machine was disturbed: {machine.sentence()}."
    return what, machine.share, "Stop the other work, or do not trust these speeds."


def too_many_threads(facts: Facts) -> Cause:
    """More threads than CPUs: at each barrier, the others wait for one that has no CPU."""
    if not facts.is_crowded:
        return None
    n, cpus = facts.n_threads, facts.session.start.host.cores
    what = f"{n} threads share {cpus} CPUs, so threads wait for one that has no CPU."
    share = facts.machine.share if facts.machine else 1 - cpus / n
    return what, share, f"Use at most {cpus} threads (n_threads, --threads)."


def waiting_threads(facts: Facts) -> Cause:
    """Thread 0 waits in barriers for the others (WAITING)."""
    if facts.n_threads < 2 or facts.lacks_cpus or slow_threads(facts):
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
    what = f"Threads wait for each other: thread 0 spent {shown(waiting, 'ns')} in barriers."
    advice = f"Try fewer than {facts.n_threads} threads: the kernels are too small to share."
    return what, share, advice


def slow_threads(facts: Facts) -> Cause:
    """Some threads end matrix products later than the others, which wait for them (SLOW): twice as
    long as they do in all, and longer in every part of the session (PARTS)."""
    threads = facts.session.threads
    threads = threads.rows(np.isin(threads["compute"], facts.computes["compute"]))
    _, at, n_threads = np.unique(threads["compute"], return_inverse=True, return_counts=True)
    n = int(n_threads.max(initial=0))
    threads = threads.rows(n_threads[at] == n)
    if n < 2 or facts.is_crowded:
        return None
    by_thread = np.argsort(threads["thread"], kind="stable")
    work, wait = (
        threads[name][by_thread].reshape(n, -1) for name in ("in_products", "after_products")
    )
    shares = wait.sum(axis=1) / np.maximum((work + wait).sum(axis=1), 1)
    order = np.argsort(shares)
    slow, fast = np.split(order, [1 + int(np.diff(shares[order]).argmax())])
    parts = np.array_split(wait, min(PARTS, wait.shape[1]), axis=1)
    share = float(wait[fast].sum() / max((work + wait)[fast].sum(), 1))
    always = all(part[fast].mean() > part[slow].mean() for part in parts)
    if share < SLOW or not always or wait[fast].mean() < 2 * wait[slow].mean():
        return None
    what = (
        f"The slower {len(slow)} of {n} threads delay the others, which spend {100 * share:.0f} %"
        " of the time of matrix products waiting."
    )
    advice = (
        f"Keep them off slow or busy CPUs (taskset), or use fewer threads (--threads {len(fast)})."
    )
    return what, share, advice


def small_batches(facts: Facts) -> Cause:
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
    step, at, parts = np.unique(computes["step"], return_inverse=True, return_counts=True)
    if not slow and len(step):
        small = (parts[at] >= SPLIT) & (computes["n_tokens"] < SMALL_BATCH)
        cost = int(computes["dur"][small].sum())
        n_batches, n_tokens = int(small.sum()), int(computes["n_tokens"][small].sum())
    if not cost:
        return None
    each = n_tokens / n_batches
    what = (
        f"Prompts are computed in small batches, {each:.0f} tokens at a time; each batch reads"
        " every weight."
    )
    allowed = min((min(c.n_batch, c.n_ubatch) for c in facts.session.contexts.values()), default=0)
    advice = "Raise n_batch and n_ubatch (--batch, --ubatch)."
    if allowed >= 2 * each:
        advice = f"Pass more of a prompt at once: a batch can have {allowed:,} tokens."
    return what, cost / facts.step_time, advice


def rebuilt_graphs(facts: Facts) -> Cause:
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
    if built.mean() < REBUILT:
        return None
    # medians, because a kernel that waits for a CPU makes some decodes many times as long
    usual = np.median(costs[built]) * built.mean()
    if usual < REBUILT_COST * np.median(steps["end"] - steps["begin"]):
        return None
    cost = int(costs.sum())
    what = (
        f"{int(built.sum()):,} of {len(decodes):,} decodes built a new graph, which took"
        f" {shown(cost, 'ns')}."
    )
    advice = "Batches kept their size: look for adapters or samplers that change between decodes."
    if len(set(steps.tuples("n_seqs", "n_outputs"))) > 1:
        advice = (
            "Keep the number of sequences and outputs of a batch the same, so that graphs are"
            " reused."
        )
    return what, cost / facts.step_time, advice


def weights_held_twice(facts: Facts) -> Cause:
    """Weights were repacked from a mapped file, whose pages also stay in memory (HELD_TWICE).
    llama.cpp unmaps only what lies before and after the weights that it uses in place."""
    tensors = facts.session.tensors
    total = sum(tensor.bytes for tensor in tensors)
    repacked = sum(t.bytes for t in tensors if t.buffer.startswith(INTERLEAVED))
    mapped = any(t.buffer.endswith("_Mapped") for t in tensors)
    if not mapped or not total or repacked / total < HELD_TWICE:
        return None
    what = (
        f"Up to {shown(repacked, 'bytes')} of weights are in memory twice: repacked, and mapped"
        " from the file."
    )
    return what, repacked / total, "If memory is short: load without mmap, or without repacking."


def no_interleaved_kernel(facts: Facts) -> Cause:
    """Some types were repacked for faster kernels, but an expensive one was not (NO_KERNEL)."""
    tensors = facts.session.tensors
    repacked = {t.type for t in tensors if t.buffer.startswith(INTERLEAVED)}
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
    what = (
        f"Weights of {kind} have no interleaved kernel on this machine;"
        f" {', '.join(sorted(repacked))} have one."
    )
    rows = {t.ne[0] for t in tensors if t.type == kind and t.ne and t.name in spent[kind]}
    advice = "None of the types with one has blocks that divide the rows of these tensors."
    if (best := _interleaved(kind, repacked, rows)) is not None:
        advice = f"Quantize these tensors to {best} and compare speed and errors (instr compare)."
    return what, cost / total, advice


def _interleaved(kind: str, repacked: set[str], rows: set[int]) -> GgmlType | None:
    """The repacked type nearest in size to `kind` whose blocks divide the rows. Otherwise Q4_0,
    which ggml interleaves wherever it interleaves another type, or None if that does not fit."""
    for names in (sorted(repacked), {"q4_0"} - {kind}):
        types = [BY_NAME[name.upper()] for name in names if name.upper() in BY_NAME]
        if fitting := [of for of in types if all(row % of.block == 0 for row in rows)]:
            bits = BY_NAME[kind.upper()].bits_per_weight if kind.upper() in BY_NAME else 0.0
            return min(fitting, key=lambda of: abs(of.bits_per_weight - bits))
    return None


def cold_start(facts: Facts) -> Cause:
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
    what = (
        f"The first step took {shown(extra, 'ns')} longer than others like it, with"
        f" {int(steps['minflt'][0]):,} minor and {int(steps['majflt'][0]):,} major page faults."
    )
    mapped = any(t.buffer.endswith("_Mapped") for t in facts.session.tensors)
    advice = "Run one step before measuring" + (", or load without mmap." if mapped else ".")
    return what, extra / facts.step_time, advice


def costly_sampling(facts: Facts) -> Cause:
    """The samplers take a large part of the time (SAMPLING), even without interruptions
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
    what = f"Sampling takes {shown(sampling / len(dur), 'ns')} a token{model}."
    return what, share, "Put top-k first in the sampler chain; grammars cost most."


def slow_application(facts: Facts) -> Cause:
    """Between the tokens of requests, the application takes much of the time (APPLICATION, and
    APPLICATION_NS on average of APPLICATION_TOKENS or more)."""
    if facts.lacks_cpus:
        return None
    between = sum(int(request.between_tokens.sum()) for request in facts.requests)
    begins, ends = np.sort(facts.steps["begin"]), np.sort(facts.steps["end"])
    outside = n = 0
    samplers = {t + dur: dur for t, dur in facts.session.tokens.tuples("t", "dur")}
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
    what = f"Between tokens, {shown(outside, 'ns')} pass outside of llama.cpp."
    advice = "Profile the application: what it does with a token delays the next."
    return what, outside / between, advice


def memory_bound(facts: Facts) -> Cause:
    """Decodes read their weights nearly as fast as memory can deliver them (BANDWIDTH)."""
    if facts.probe is None:
        return None
    decodes = facts.computes.rows(facts.computes["phase"] == "decode")
    threads = dict(decodes.tuples("compute", "n_threads"))
    spent = moved = 0
    least = 0.0
    """ns that the roof allows"""
    for ops in facts.account.ops:
        n_bytes = facts.session.work(ops).of_computes().bytes.tolist()
        for compute, n, ns in zip(ops.compute.tolist(), n_bytes, ops.totals.tolist(), strict=True):
            if compute in threads:
                roof = facts.probe.bandwidth_of(threads[compute], n).bytes_per_second
                spent += ns
                moved += n
                least += n / roof * 1e9
    if not spent or least / spent < BANDWIDTH:
        return None
    rate = shown(moved / spent * 1e9, "bytes_per_second")
    what = (
        f"Decoding is bound by memory: kernels move {rate} a second, {100 * least / spent:.0f} % of"
        " what `instr probe` measured."
    )
    advice = (
        "Only fewer bytes help: several sequences in a batch, or a smaller type of weights, whose"
        " errors `instr quality` shows."
    )
    return what, spent / facts.step_time, advice


def missed_reuse(facts: Facts) -> Cause:
    """A server computed prompts that a slot had already held (MISSED)."""
    waits = waits_of(facts.requests, facts.by_time)
    missed = missed_prompts(facts.requests)
    costs = cost_by_reason(facts.requests, missed, [wait.prompt for wait in waits])
    share = sum(of.ns for of in costs.values()) / facts.step_time
    if share < MISSED:
        return None
    reason, most = next(iter(costs.items()))
    n = sum(of.missed for of in costs.values())
    what = f"A slot had already held {n:,} of the computed prompt tokens; main reason:"
    return f"{what} {reason} ({counted(most.requests, 'request')}).", share, ADVICE[reason]


RULES: tuple[tuple[str, str, Callable[[Facts], Cause]], ...] = (
    ("disturbed-machine", "the process's CPU time", disturbed_machine),
    ("too-many-threads", "the process's CPU time", too_many_threads),
    ("waiting-threads", "the steps' time", waiting_threads),
    ("small-batches", "the steps' time", small_batches),
    ("rebuilt-graphs", "the steps' time", rebuilt_graphs),
    ("held-twice", "the weights' bytes", weights_held_twice),
    ("no-interleaved-kernel", "the kernels' time", no_interleaved_kernel),
    ("cold-start", "the steps' time", cold_start),
    ("costly-sampling", "the time by the clock", costly_sampling),
    ("slow-application", "the time between tokens", slow_application),
    ("memory-bound", "the steps' time", memory_bound),
    ("missed-reuse", "the steps' time", missed_reuse),
    ("slow-threads", "the fast threads' time", slow_threads),
    ("cpu-between", "the steps' time", lambda facts: cpu_between(facts.account)),
    ("device-waits", "the steps' time", lambda facts: device_waits(facts.account)),
    ("caller-waits", "the steps' time", lambda facts: caller_waits(facts.account)),
    ("layers-fit", "the steps' time", lambda facts: layers_still_fit(facts.account)),
    ("graph-again", "the steps' time", lambda facts: graph_again(facts.account)),
    ("slow-link", "the steps' time", lambda facts: slow_link(facts.account)),
    ("slow-machine", "the steps' time", lambda facts: slow_machine(facts.account)),
)
"""Names, what their shares are of, and the rules. Names never change; add new ones at the end."""
