"""How long a step takes: the recorded steps, and predictions where none like it was recorded.

A step computes ubatches. One of n tokens takes the time of recorded ones of n tokens, and more for
each cell that its tokens see. Between two recorded numbers of tokens, the time has the shape of the
prediction, scaled to both; without a prediction it is linear. What a server does between two steps
is linear in the tokens that were sampled. All times are in ns, and all but those of noise are
means: requests take sums of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.log.requests import Request, prompt_copies, server_context
from llamacpp_instr.log.schema import Context
from llamacpp_instr.log.session import Session, Table

Float64 = NDArray[np.float64]

Predict = Callable[[Sequence[tuple[int, int, int]], str, str], Sequence[float]]
"""predicts the time in ns of ubatches of (tokens, outputs, tokens before them) with these types of
the cache's K and V. Raises InstrError if it cannot"""

NEAR = 1.15
"""ratio of two numbers of tokens whose ubatches are alike"""
FEW = 3
"""ubatches of a kind that are enough for a mean"""
TRIMMED = 0.02
"""share of the slowest and of the fastest that a mean leaves out: other work disturbed them"""
FEW_TOKENS = 8
"""up to which each number has a mean of its own, because one token more adds much"""
SURE = 3.0
"""standard errors by which a slope must differ from 0"""
LEAST_CELLS = 16
"""the fewest tokens of a prompt whose cost of cells is separated from that of its tokens"""


GRID = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""tokens of predicted ubatches; times between them are interpolated linearly"""
FAR, MANY = 1024, 256
"""cells and tokens of the ubatches that show what a cell costs"""


@dataclass(frozen=True)
class Shape:
    """Predicted times, for one type of the cache, ns."""

    decode: list[float]
    """of n tokens with an output each, without the cells that they see"""
    prompt: list[float]
    """of n tokens with one output"""
    cell: float
    prompt_cell: float


def predicted_shape(predict: Predict, type_k: str, type_v: str, most: int) -> Shape:
    """The predicted times of ubatches of up to `most` tokens. Raises what `predict` raises."""
    grid = [n for n in GRID if n < most] + [most]
    asked = [(n, n, 0) for n in grid] + [(n, 1, 0) for n in grid]
    asked += [(1, 1, FAR), (MANY, 1, 0), (MANY, 1, FAR)]
    ns = list(predict(asked, type_k, type_v))
    one, many, after = ns[-3:]
    cell, prompt_cell = (one - ns[0]) / FAR, (after - many) / FAR / MANY
    curves = []
    for i, of in enumerate((cell, prompt_cell)):
        part = ns[i * len(grid) : (i + 1) * len(grid)]
        own = [t - of * n * (n + 1) / 2 for n, t in zip(grid, part, strict=True)]
        curves.append(np.maximum(np.interp(range(most + 1), grid, own), 1.0).tolist())
    return Shape(curves[0], curves[1], max(cell, 0.0), max(prompt_cell, 0.0))


class Curve:
    """The time of ubatches by their tokens, without the cells that they see."""

    def __init__(
        self, tokens: Sequence[float], ns: Sequence[float], shape: Sequence[float] | None = None
    ) -> None:
        """From recorded means, ascending by tokens; `shape` has a predicted time for 0, 1, 2, …
        tokens."""
        self._tokens, self._ns, self._shape = list(tokens), list(ns), shape
        self._slope, self._start = _line(self._tokens, self._ns)

    def at(self, n: int) -> float:
        """The time of `n` tokens, ns."""
        base = [self._base(of) for of in self._tokens]
        ratios = [ns / of for ns, of in zip(self._ns, base, strict=True)]
        return float(np.interp(n, self._tokens, ratios)) * self._base(n)

    def is_near(self, n: int) -> bool:
        """Whether ubatches of about `n` tokens were recorded."""
        at = bisect_left(self._tokens, n)
        near = self._tokens[max(at - 1, 0) : at + 1]
        return any(max(n / of, of / n) <= NEAR for of in near)

    def _base(self, n: float) -> float:
        if self._shape is not None and n < len(self._shape):
            return float(np.interp(n, range(len(self._shape)), self._shape))
        at = bisect_left(self._tokens, n)
        if 0 < at < len(self._tokens):
            return float(np.interp(n, self._tokens, self._ns))
        return max(self._start + self._slope * n, 1.0)


def _line(tokens: Sequence[float], ns: Sequence[float]) -> tuple[float, float]:
    """The slope and the start of a line through the means, neither of them below 0."""
    if len(tokens) < 2:
        return 0.0, ns[0] if ns else 0.0
    slope, start = np.polyfit(tokens, ns, 1)
    if start < 0:
        slope, start = float(np.dot(tokens, ns) / np.dot(tokens, tokens)), 0.0
    return (float(slope), float(start)) if slope > 0 else (0.0, float(np.mean(ns)))


@dataclass
class Noise:
    """Deviations of recorded steps from their means, in recorded order, because neighbours resemble
    each other. Each run of steps takes the next ones."""

    sums: list[float]
    """the sum of the first i deviations of decodes, as parts of their means"""
    prompts: list[float]
    """of steps with a prompt"""
    random: Random
    at: int = 0

    def take(self, k: int) -> tuple[list[float], int]:
        """The sums, and where `k` steps may begin."""
        if self.at + k >= len(self.sums):
            self.at = self.random.randrange(max(len(self.sums) - k, 1))
        return self.sums, self.at

    def prompt(self) -> float:
        """The factor of one step with a prompt."""
        return 1.0 + self.random.choice(self.prompts)


@dataclass
class StepTimes:
    """Times of a server, in ns."""

    decode: Curve
    """of ubatches with an output for each token"""
    prompt: Curve
    """of those with at most one output"""
    cell_ns: float
    """of a cell that a token sees"""
    prompt_cell_ns: float
    """the same for a prompt"""
    rebuild_ns: float = 0.0
    """of a graph that cannot be used again"""
    step_ns: float = 0.0
    """of a step outside its ubatches"""
    between_ns: float = 0.0
    """between two steps"""
    token_ns: float = 0.0
    """of the sampling and sending of a token"""
    end_ns: float = 0.0
    """of the end of a request"""
    launch_ns: float = 0.0
    """of a slot that takes a request"""
    wake_ns: float = 0.0
    """until a server without work begins"""
    copy_ns: float = 0.0
    """of a token that is copied to or from RAM"""
    bytes_of_token: float = 0.0
    """in the cache"""
    drafts: list[tuple[int, int]] = field(default_factory=list)
    """how many tokens each recorded draft had, and how many of them were accepted"""
    draft: Curve | None = None
    """of steps that draft, by the slots that they draft for"""
    follow: Curve | None = None
    """of those in which the draft model follows a batch, by its tokens"""
    decode_noise: Sequence[float] = (0.0,)
    prompt_noise: Sequence[float] = (0.0,)
    others: bool = False
    """whether all steps are of a kind that was not recorded"""
    shape: Shape | None = None
    """the prediction that it follows, None without one"""
    _known: dict[tuple[int, int], float] = field(default_factory=dict)

    def predicted(self, predict: Predict | None, type_k: str, type_v: str, most: int) -> StepTimes:
        """The times with other types of the cache or on another machine: those recorded, scaled by
        the ratio of the predictions, or the new prediction itself if the recorded server has none.
        Without `predict`, the times stay the same."""
        if predict is None:
            return replace(self, others=True, _known={})
        new = predicted_shape(predict, type_k, type_v, most)
        own, n = self.shape, range(1, most + 1)

        def scaled(curve: Curve, new: list[float], old: list[float] | None) -> Curve:
            ns = [new[i] * (curve.at(i) / old[i] if old else 1.0) for i in n]
            return Curve(n, ns, new)

        def cell(recorded: float, new: float, old: float) -> float:
            return recorded * new / old if recorded and old else new

        return replace(
            self, others=True, _known={}, shape=new,
            decode=scaled(self.decode, new.decode, own.decode if own else None),
            prompt=scaled(self.prompt, new.prompt, own.prompt if own else None),
            cell_ns=cell(self.cell_ns, new.cell, own.cell if own else 0.0),
            prompt_cell_ns=cell(
                self.prompt_cell_ns, new.prompt_cell, own.prompt_cell if own else 0.0
            ),
        )  # fmt: skip

    def ubatch(self, tokens: int, outputs: int) -> float:
        """The time of a ubatch with these tokens, without the cells that they see."""
        key = tokens, outputs
        if (ns := self._known.get(key)) is None:
            if outputs == tokens:
                ns = self.decode.at(tokens)
            else:
                ns = self.prompt.at(tokens)
                if outputs > 1:
                    ns += max(self.decode.at(outputs) - self.prompt.at(outputs), 0.0)
            self._known[key] = ns
        return ns

    def is_measured(self, tokens: int, outputs: int) -> bool:
        """Whether such a ubatch was recorded."""
        curve = self.decode if outputs == tokens else self.prompt
        return not self.others and curve.is_near(tokens)

    def drafting(self, drafted: Sequence[int], tokens: int) -> float:
        """The draft model's part of a step with `tokens` tokens: it makes drafts of these lengths
        for its slots, one token of each at a time, and follows the batch."""
        ns = self.follow.at(tokens) if self.follow else 0.0
        if self.draft:
            for i in range(max(drafted, default=0)):
                ns += self.draft.at(sum(n > i for n in drafted))
        return ns

    def noise(self, seed: int) -> Noise:
        """The noise of steps; the same seed gives the same."""
        longest = 2 * MOST_RUN
        of = np.array(self.decode_noise, np.float64)
        repeated = np.resize(of, max(len(of), longest))
        sums = np.concatenate([[0.0], np.cumsum(repeated)]).tolist()
        random = Random(seed)
        return Noise(sums, list(self.prompt_noise), random, random.randrange(len(of)))

    def without_noise(self) -> StepTimes:
        """The same times, with all steps taking their mean."""
        return replace(self, decode_noise=(0.0,), prompt_noise=(0.0,))


MOST_RUN = 4096
"""steps that are advanced at once"""


@dataclass
class _Ubatch:
    """A recorded compute."""

    tokens: int
    outputs: int
    work: float
    """the sum of the cells that its tokens see"""
    ns: float
    """without building its graph"""
    step: int


def fit(
    session: Session,
    steps: Table,
    requests: Sequence[Request],
    predict: Predict | None = None,
) -> StepTimes:
    """The times of the server that a log recorded; `steps` and `requests` are those of
    `find_requests`. What was not recorded comes from `predict`. Raises UsageError if the log has no
    requests, or too few steps."""
    context = server_context(session.contexts.values())
    if context is None or not any(of.token_times for of in requests):
        raise UsageError(f"{session.path}: no requests; record a llama-server that serves some")
    ubatches, builds, beside = _recorded(session, steps, context)
    decodes = [of for of in ubatches if of.outputs == of.tokens]
    prompts = [of for of in ubatches if of.outputs != of.tokens]
    if len(decodes) < FEW or len(prompts) < FEW:
        raise UsageError(
            f"{session.path}: {counted(len(decodes), 'decode')} and"
            f" {counted(len(prompts), 'prompt')} are too few;"
            " record some more requests"
        )
    shape = None
    if predict is not None:
        shape = predicted_shape(predict, context.type_k, context.type_v, context.n_ubatch)
    cell = _cell_ns(decodes, shape.cell if shape else 0.0)
    like = shape.prompt_cell / shape.cell * cell if shape and shape.cell else cell
    prompt_cell = _cell_ns([of for of in prompts if of.tokens >= LEAST_CELLS], like)
    made = StepTimes(
        _curve(decodes, cell, shape.decode if shape else None),
        _curve(prompts, prompt_cell, shape.prompt if shape else None),
        cell, prompt_cell, shape=shape,
    )  # fmt: skip
    made.rebuild_ns = _mean(builds)
    made.step_ns = _mean(beside)
    _add_between(made, session, steps, requests)
    _add_drafts(made, session, steps)
    memory = [of for of in session.memory if of.ctx == context.ctx]
    if memory:
        made.bytes_of_token = sum(use.context for use in memory[-1].buffers) / context.n_ctx
    _add_noise(made, ubatches)
    return made


def _recorded(
    session: Session, steps: Table, context: Context
) -> tuple[list[_Ubatch], list[float], list[float]]:
    """The ubatches whose composition is known; the times of graphs that were built; and the times
    of steps outside their ubatches."""
    from llamacpp_instr.converters.scheduling.capacity.batches import split

    parts: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    for step, seq, pos, tokens, outputs in session.sequences.tuples(
        "step", "seq", "pos", "tokens", "outputs"
    ):
        parts[step].append((seq, pos, tokens, outputs))
    computes: dict[int, list[tuple[int, float, float, bool]]] = defaultdict(list)
    c = session.computes
    for step, n, apply, build, alloc, inputs, dur, reused in c.tuples(
        "step", "n_tokens", "apply", "build", "alloc", "inputs", "dur", "reused"
    ):
        computes[step].append((n, apply + inputs + dur, build + alloc, reused))
    found: list[_Ubatch] = []
    builds: list[float] = []
    beside: list[float] = []
    numbers = steps.tuples("step", "ctx", "begin", "end")
    for row, (step, ctx, begin, end) in enumerate(numbers):
        if ctx != context.ctx or step not in computes:
            continue
        of_step = sorted(parts[step], key=lambda of: (of[2] != of[3], of[0]))
        ubatches = split([(of[0], of[2]) for of in of_step], context.n_ubatch, context.kv_unified)
        measured = computes[step]
        beside.append(end - begin - sum(of[1] + of[2] for of in measured))
        builds += [of[2] for of in measured if not of[3]]
        if [sum(n for _, n in of) for of in ubatches] != [of[0] for of in measured]:
            continue
        cells, left = [of[1] for of in of_step], [of[2] for of in of_step]
        for ubatch, (n_tokens, ns, _, _) in zip(ubatches, measured, strict=True):
            work, outputs = 0.0, 0
            for i, n in ubatch:
                work += n * cells[i] + n * (n + 1) / 2
                cells[i] += n
                left[i] -= n
                every = of_step[i][3] == of_step[i][2]
                outputs += n if every else int(not left[i] and of_step[i][3] > 0)
            found.append(_Ubatch(n_tokens, outputs, work, ns, row))
    return found, builds, beside


def _cell_ns(ubatches: Sequence[_Ubatch], otherwise: float) -> float:
    """The slope of the time over the cells, among ubatches with similar numbers of tokens."""
    groups: dict[int, list[_Ubatch]] = defaultdict(list)
    for of in ubatches:
        groups[of.tokens if of.outputs == of.tokens else round(np.log(of.tokens) / 0.1)].append(of)
    above = below = spread = 0.0
    free = 0
    for of_group in groups.values():
        if len(of_group) < FEW:
            continue
        n, work, ns = (
            np.array([getattr(of, name) for of in of_group], np.float64)
            for name in ("tokens", "work", "ns")
        )
        x = np.stack([work - work.mean(), n - n.mean()])
        y = ns - ns.mean()
        if x[1].any():
            # what the tokens explain is not due to the cells
            x[0] -= x[1] * (x[0] @ x[1]) / (x[1] @ x[1])
            y = y - x[1] * (y @ x[1]) / (x[1] @ x[1])
        above += float(x[0] @ y)
        below += float(x[0] @ x[0])
        spread += float(y @ y)
        free += len(of_group) - 2
    if below <= 0 or free < FEW:
        return otherwise
    slope = above / below
    error = (max(spread - slope * above, 0.0) / free / below) ** 0.5
    return slope if slope > SURE * error and (not otherwise or slope < 4 * otherwise) else otherwise


def _curve(ubatches: Sequence[_Ubatch], cell_ns: float, shape: Sequence[float] | None) -> Curve:
    """The mean for each number of tokens; for similar numbers together, if ubatches are few."""
    groups: list[list[_Ubatch]] = []
    for of in sorted(ubatches, key=lambda of: of.tokens):
        exact = of.outputs == of.tokens or of.tokens <= FEW_TOKENS
        first = groups[-1][0].tokens if groups else 0
        alike = of.tokens == first or (
            not exact
            and first > FEW_TOKENS
            and (of.tokens <= 1.05 * first or len(groups[-1]) < FEW)
        )
        if alike:
            groups[-1].append(of)
        else:
            groups.append([of])
    tokens = [float(np.mean([of.tokens for of in group])) for group in groups]
    ns = [_mean([of.ns - cell_ns * of.work for of in group]) for group in groups]
    return Curve(tokens, [max(of, 1.0) for of in ns], shape)


def _mean(values: Sequence[float]) -> float:
    """The mean without the extremes."""
    if not values:
        return 0.0
    ordered = sorted(values)
    cut = int(TRIMMED * len(ordered))
    return float(np.mean(ordered[cut : len(ordered) - cut]))


def _add_between(
    made: StepTimes, session: Session, steps: Table, requests: Sequence[Request]
) -> None:
    """What the server does between steps."""
    drafts = steps["phase"] == "draft"
    drafting = np.cumsum(np.where(drafts, steps["end"] - steps["begin"], 0))[~drafts]
    place = np.cumsum(~drafts) - 1
    draft_rows = set(np.flatnonzero(drafts).tolist())
    steps = steps.rows(~drafts)
    begin, end = steps["begin"], steps["end"]
    goes_on = np.zeros(len(steps), np.bool_)
    starts, ends = np.zeros((2, len(steps)), np.int64)
    for of in requests:
        rows = place[[row for row in of.steps if row not in draft_rows]]
        if len(rows):
            goes_on[rows[:-1][rows[1:] == rows[:-1] + 1]] = True
            starts[rows[0]] += 1
            ends[rows[-1]] += 1
    row_of = {step: row for row, step in enumerate(steps["step"].tolist())}
    of_step: dict[int, list[int]] = defaultdict(list)
    for step, t, dur in session.tokens.tuples("step", "t", "dur"):
        if step in row_of:
            of_step[row_of[step]].append(t + dur)
    apart = [b - a for of in of_step.values() for a, b in pairwise(of)]
    made.token_ns = _mean(apart)
    made.end_ns = _mean([max(of.end - of.token_times[-1], 0) for of in requests if of.token_times])
    copies = prompt_copies(session)
    tokens = sum(of.tokens for of in copies)
    made.copy_ns = sum(of.dur for of in copies) / tokens if tokens else 0.0
    copied = np.zeros(len(steps))
    for note in session.notes:
        if note.name == "prompt-copy":
            at = int(np.searchsorted(begin, note.t)) - 1
            if 0 <= at < len(steps):
                copied[at] += note.data.get("dur", 0)
    outputs = np.zeros(len(steps))
    for row, of_row in of_step.items():
        outputs[row] = len(of_row)
    gap = np.zeros(len(steps))
    gap[:-1] = begin[1:] - end[:-1] - np.diff(drafting)
    rest = gap - copied - made.token_ns * outputs - made.end_ns * ends
    plain = goes_on.copy()
    plain[:-1] &= (starts[1:] == 0) & (ends[:-1] == 0)
    plain[-1] = False
    made.between_ns = max(_mean(rest[plain].tolist()), 0.0)
    begins = goes_on.copy()
    begins[:-1] &= starts[1:] == 1
    begins[-1] = False
    made.launch_ns = max(_mean((rest[begins] - made.between_ns).tolist()), 0.0)
    alone = []
    for of in requests:
        row = int(place[of.steps[0]]) if of.steps else 0
        if of.arrival >= 0 and row and not goes_on[row - 1] and end[row - 1] < of.arrival:
            alone.append(of.begin - of.arrival)
    made.wake_ns = max(_mean(alone) - made.launch_ns, 0.0)


def _add_drafts(made: StepTimes, session: Session, steps: Table) -> None:
    """What drafts had, and the time of steps that drafted: `Batches` says which steps verify."""
    counted = set(steps["step"].tolist())
    sampled = Counter(session.tokens.tuples("step", "seq"))
    columns = session.sequences.tuples("step", "seq", "tokens", "outputs", "prompt")
    drafting = steps["phase"] == "draft"
    of_draft = set(steps["step"][drafting].tolist())
    made.drafts = [
        (tokens - 1, max(sampled[step, seq] - 1, 0))
        for step, seq, tokens, outputs, prompt in columns
        if step in counted and step not in of_draft and not prompt and 1 < tokens == outputs
    ]
    took: dict[tuple[bool, int], list[float]] = defaultdict(list)
    for begin, end, tokens, outputs, seqs in steps.rows(drafting).tuples(
        "begin", "end", "n_tokens", "n_outputs", "n_seqs"
    ):
        took[tokens == outputs == seqs, tokens].append(end - begin)
    for drafts, name in ((True, "draft"), (False, "follow")):
        found = sorted((n, _mean(ns)) for (is_draft, n), ns in took.items() if is_draft is drafts)
        if found:
            setattr(made, name, Curve([n for n, _ in found], [ns for _, ns in found]))


def _add_noise(made: StepTimes, ubatches: Sequence[_Ubatch]) -> None:
    """How far each step was from its mean."""
    by_step: dict[int, list[_Ubatch]] = defaultdict(list)
    for of in ubatches:
        by_step[of.step].append(of)
    noise: dict[bool, list[float]] = {True: [], False: []}
    for of_step in by_step.values():
        is_decode = all(of.tokens == of.outputs for of in of_step)
        mean = deviation = 0.0
        for of in of_step:
            cell = made.cell_ns if of.tokens == of.outputs else made.prompt_cell_ns
            ns = made.ubatch(of.tokens, of.outputs) + cell * of.work
            mean += ns
            deviation += of.ns - ns
        noise[is_decode].append(deviation / mean)
    for is_decode, name in ((True, "decode_noise"), (False, "prompt_noise")):
        values = np.array(noise[is_decode] or [0.0])
        setattr(made, name, (values - values.mean()).tolist())
