"""What only a server's requests have: prompts that were computed although they had been in a
cache, and drafted tokens.

Invariant: a request's missed tokens have one cause, the one with the most tokens; a token costs
the mean of its own prompt. A draft is verified in a decode of the target that has an output for
each drafted token and one more; the tokens that were sampled from it, except the last, are the
accepted ones. All times are in ns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.memory import recorded_file
from llamacpp_instr.converters.analyses.tables import header
from llamacpp_instr.log.requests import Copied, Request
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.report.report import Cell, Figures, Report, shown

Int64 = NDArray[np.int64]

OFF, CHECKPOINT, ELSEWHERE = "reuse is off", "no checkpoint", "another slot"
SHIFTED, EVICTED, CHANGED, SHORT = "shifted", "evicted", "another beginning", "new text"
ADVICE = {
    OFF: "Leave `cache_prompt` on.",
    CHECKPOINT: "Set `--swa-full`, or raise `--ctx-checkpoints`.",
    ELSEWHERE: "Send a conversation to its slot (`id_slot`), or give the server more slots.",
    SHIFTED: "Give the server a larger context.",
    EVICTED: "Give the server more slots, or more memory for prompts (`--cache-ram`).",
    CHANGED: "Put what changes, such as the date, at the end of the prompt.",
    SHORT: "",
}
"""for each reason why a prompt was not reused, what to try"""


@dataclass(frozen=True)
class Missed:
    """Why a prompt was computed."""

    reason: str
    tokens: int
    """that the slot could have reused, and computed"""


def missed_of(request: Request, shifted: bool = False) -> Missed | None:
    """Why the slot did not reuse more of the prompt; None if it reused all, or if that is unknown.
    `shifted`: the slot's previous request was longer than its context."""
    of = request.taken
    if of is None or of.cached >= of.prompt - 1:
        return None
    held = {
        CHECKPOINT: of.here - of.cached,
        ELSEWHERE: of.elsewhere - of.cached,
        SHIFTED if shifted else EVICTED: of.before - of.cached,
        CHANGED: of.moved,
    }
    reason, tokens = max(held.items(), key=lambda item: item[1])  # the first of equal ones
    if tokens < 2:  # at least one token of a prompt is computed
        return Missed(SHORT, 0)
    return Missed(reason if of.reuse else OFF, tokens)


def missed_prompts(requests: Sequence[Request]) -> list[Missed | None]:
    """`missed_of` each request."""
    latest: dict[tuple[int, int], Request] = {}
    found = []
    for request in requests:
        before = latest.get((request.ctx, request.seq))
        shifted = before is not None and before.served is not None and before.served.truncated
        found.append(missed_of(request, shifted))
        latest[request.ctx, request.seq] = request
    return found


@dataclass
class Cost:
    """The cost of all prompts that were not reused for one reason."""

    requests: int = 0
    computed: int = 0
    """prompt tokens"""
    missed: int = 0
    """those of them that could have been reused"""
    ns: int = 0
    """time of the missed tokens"""


def cost_by_reason(
    requests: Sequence[Request], missed: Sequence[Missed | None], prompt_ns: Sequence[int]
) -> dict[str, Cost]:
    """The costs, the largest first; `prompt_ns` is the time of each request's prompt steps."""
    costs: defaultdict[str, Cost] = defaultdict(Cost)
    for request, of, ns in zip(requests, missed, prompt_ns, strict=True):
        if of is not None:
            cost = costs[of.reason]
            cost.requests += 1
            cost.computed += request.prompt
            cost.missed += of.tokens
            cost.ns += round(ns * min(of.tokens / max(request.prompt, 1), 1.0))
    return dict(sorted(costs.items(), key=lambda item: -item[1].ns))


def reuse_report(costs: Mapping[str, Cost], prompt_ns: Sequence[int]) -> Iterator[Report]:
    """A row for each reason why prompts were not reused; none if slots had held none of them."""
    whole = max(sum(prompt_ns), 1)
    rows: list[list[Cell]] = [
        [reason, of.requests, of.computed, of.missed, of.ns, of.ns / whole, ADVICE[reason]]
        for reason, of in costs.items()
    ]
    columns = header(
        "Not reused: why", ("count", "requests", "computed", "had been there"), ("ns", "cost"),
        ("share", "of prompts' time"), "what to try",
    )  # fmt: skip
    if any(of.missed for of in costs.values()):
        yield Report("Prompts that were not reused", columns, rows)


COPIED = {"save": "from a slot to RAM", "load": "from RAM to a slot"}


def copies_report(copies: Sequence[Copied]) -> Iterator[Report]:
    """How often a server moved prompts between its slots and its copies in RAM, and what that took;
    nothing without a move."""
    if not copies:
        return
    rows: list[list[Cell]] = []
    for op, move in COPIED.items():
        of = [copy for copy in copies if copy.op == op]
        sums = (sum(getattr(copy, name) for copy in of) for name in ("tokens", "bytes", "dur"))
        rows.append([move, len(of), *sums])
    last = copies[-1]
    limit = f" of {shown(last.limit, 'bytes')}" if last.limit else ""
    notes = [
        f"Copies after the last move: {last.copies:,}, with"
        f" {shown(last.held, 'bytes')}{limit} (--cache-ram)."
    ]
    columns = header(
        "Prompts moved", ("count", "count", "tokens"), ("bytes", "bytes"), ("ns", "time")
    )
    yield Report("Copies of prompts in RAM", columns, rows, notes)


# --- speculative decoding ---


Predict = Callable[[Path, int, Sequence[tuple[int, int]]], Sequence[float]]
"""predicts the time in ns of a step of a model file with this many threads, for each pair: the
tokens of the step, and the tokens before them. Raises InstrError if it cannot"""


@dataclass(frozen=True)
class Speculation:
    """What drafts of a session did."""

    drafted: Int64
    """how many drafts had a token at each position, (positions,)"""
    accepted: Int64
    """how many of these tokens were accepted, (positions,)"""
    draft_ns: int
    """in steps of draft models"""
    verify_ns: int
    """the part of drafts in the steps that verify them, by tokens in their batches"""
    rejected_ns: int
    """the part of rejected tokens"""
    tokens: int
    """the output of these steps"""
    n_seqs: float
    """mean number of sequences in a verifying step"""
    plain_ns: float | None
    """time of a step without drafts; None if the steps are too similar"""
    plain_by: str
    """the basis of that"""


def compute_speculation(
    session: Session, steps: Table, predict: Predict | None = None
) -> Speculation | None:
    """What the drafts in `steps` did, which are those that count; None without drafts."""
    sequences = session.sequences
    row_of = {step: row for row, step in enumerate(steps["step"].tolist())}
    sampled: dict[tuple[int, int], int] = {}
    for of in session.tokens.tuples("step", "seq"):
        sampled[of] = sampled.get(of, 0) + 1
    drafts: list[tuple[int, int, int]] = []
    for step, seq, tokens, outputs, prompt in sequences.tuples(
        "step", "seq", "tokens", "outputs", "prompt"
    ):
        row = row_of.get(step, -1)
        if row >= 0 and not prompt and 1 < tokens == outputs and steps["phase"][row] != "draft":
            drafts.append((row, tokens - 1, max(sampled.get((step, seq), 1) - 1, 0)))
    if not drafts:
        return None
    rows, drafted, accepted = (np.array(of, np.int64) for of in zip(*drafts, strict=True))
    at = np.arange(drafted.max())
    dur = steps["end"] - steps["begin"]
    verifies = np.unique(rows)
    ns_per_token = dur[rows] / np.maximum(steps["n_tokens"][rows], 1)
    decodes = steps.rows(steps["phase"] == "decode")
    plain = _plain_step(session, decodes, steps.rows(verifies), predict)
    return Speculation(
        drafted=(drafted[:, None] > at).sum(axis=0),
        accepted=(accepted[:, None] > at).sum(axis=0),
        draft_ns=int(dur[steps["phase"] == "draft"].sum()),
        verify_ns=round(float(((drafted + 1) * ns_per_token).sum())),
        rejected_ns=round(float(((drafted - accepted) * ns_per_token).sum())),
        tokens=int((accepted + 1).sum()),
        n_seqs=float(steps["n_seqs"][verifies].mean()),
        plain_ns=plain[0],
        plain_by=plain[1],
    )


PLAIN = 8
"""decodes without drafts that are enough for a median"""


def _plain_step(
    session: Session, decodes: Table, verifies: Table, predict: Predict | None
) -> tuple[float | None, str]:
    """The time of a decode with one token for each sequence, and its basis: the median of such
    decodes in the log; else the prediction from the model's file, scaled by the ratio of the
    verifying steps to their own prediction; else the value on a line fitted to the times over the
    numbers of tokens. None if that is not known."""
    dur = decodes["end"] - decodes["begin"]
    n, one = decodes["n_tokens"].astype(np.float64), decodes["n_seqs"]
    plain = dur[n == one]
    if len(plain) >= PLAIN:
        return float(np.median(plain)), f"based on {len(plain):,} decodes without drafts in the log"
    if predict is not None and (ns := _predicted_step(session, verifies, predict)) is not None:
        return ns, "based on `instr predict`, scaled to the steps that verified drafts"
    if len(np.unique(n)) < 3:
        return None, ""
    slope, start = np.polyfit(n, dur, 1)
    ns = float(start + slope * np.median(one))
    return (ns if slope > 0 and ns > 0 else None), "based on the time of decodes of fewer tokens"


def _predicted_step(session: Session, verifies: Table, predict: Predict) -> float | None:
    """The prediction; None if the model's file is gone or differs, or cannot be predicted."""
    context = session.contexts[int(verifies["ctx"][0])]
    middle = {name: int(np.median(verifies[name])) for name in ("n_tokens", "n_seqs", "pos")}
    tokens = [(middle[of], max(middle["pos"], 0)) for of in ("n_seqs", "n_tokens")]
    try:
        file = recorded_file(session, session.models[context.model])
        decode, verify = predict(file.path, context.n_threads, tokens)
    except InstrError:
        return None
    return decode / verify * float(np.median(verifies["end"] - verifies["begin"]))


def speculation_reports(
    session: Session, steps: Table, predict: Predict | None = None
) -> Iterator[Report]:
    """Drafted and accepted tokens by position; the notes have their time, and what the tokens would
    have taken without drafts. Nothing without drafts."""
    of = compute_speculation(session, steps, predict)
    if of is None:
        return
    rows: list[list[Cell]] = [
        [i + 1, drafted, accepted, accepted / drafted]
        for i, (drafted, accepted) in enumerate(
            zip(of.drafted.tolist(), of.accepted.tolist(), strict=True)
        )
    ]
    drafted, accepted = int(of.drafted.sum()), int(of.accepted.sum())
    took = of.draft_ns + of.verify_ns
    rate = of.tokens / max(took, 1) * 1e9
    notes = [
        f"{counted(accepted, 'token')} of {drafted:,} drafted ones accepted"
        f" ({100 * accepted / drafted:.1f} %). Drafting took {shown(of.draft_ns, 'ns')}, verifying"
        f" {shown(of.verify_ns, 'ns')}, {shown(of.rejected_ns, 'ns')} of it for rejected tokens."
    ]
    figures: Figures = {
        "drafted": (drafted, "count"),
        "accepted": (accepted, "count"),
        "rejected": (drafted - accepted, "count"),
        "drafting": (of.draft_ns, "ns"),
        "verifying": (of.verify_ns, "ns"),
        "verifying rejected tokens": (of.rejected_ns, "ns"),
        "tokens/s": (rate, "per_second"),
    }
    if of.plain_ns is not None:
        without = of.n_seqs / of.plain_ns * 1e9
        figures["tokens/s without drafts"] = (without, "per_second")
        notes.append(
            f"{shown(rate, 'per_second')} tokens/s in these steps; without drafts it would be"
            f" about {shown(without, 'per_second')}, {of.plain_by}."
        )
    columns = header(("id", "Position"), ("count", "drafted", "accepted"), ("share", "accepted %"))
    yield Report("Speculative decoding", columns, rows, notes, figures=figures)
