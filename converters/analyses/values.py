"""The values that `--stats` read: of one session, of two side by side, by tensor and token by
token, and as maps of layers by tokens.

Invariant: figures of several computes are those of all their elements together. Only finite
elements count in the smallest, largest and mean value and in the deviation. Figures of two sessions
are over the computes of the same tokens in both; if there are none, over all of each session.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.tables import grouped, header
from llamacpp_instr.log.batches import Part
from llamacpp_instr.log.requests import Request, find_requests, parts_of_steps
from llamacpp_instr.log.schema import TensorStats
from llamacpp_instr.log.session import Session, Table
from llamacpp_instr.report.charts import Chart, map_by_layer
from llamacpp_instr.report.report import Cell, Figures, Report, known, shown

MOST_TEXT = 24
"""characters shown of one token"""
MOST_MAPS = 8
MOST_COLUMNS = 2000
"""columns of a map; later computes are not drawn"""
AXIS = "token computed; a prompt has one column for each ubatch"

_LAYER = re.compile(r"-\d+$")


class Read(NamedTuple):
    """What was read in every compute: results of one op, by the tensor's name without its layer.
    In a layer the same name can be read more than once; `place` counts."""

    tensor: str
    op: str
    layer: int
    place: int


Values = dict[Read, list[TensorStats]]


class Spread:
    """The values of several computes together: the figures of all their elements; None where no
    element is finite."""

    def __init__(self, events: Sequence[TensorStats]) -> None:
        figures = [(max(e.n - e.nan - e.inf, 0), e.mean, e.std) for e in events]
        parts = [(n, m, s) for n, m, s in figures if n and m is not None and s is not None]
        n_finite = sum(n for n, _, _ in parts)
        mean = std = None
        if n_finite:
            mean = sum(n * m for n, m, _ in parts) / n_finite
            within = sum(n * (s * s + (m - mean) * (m - mean)) for n, m, s in parts)
            std = math.sqrt(within / n_finite) if within >= 0 else None
        self.mean, self.std = known(mean), known(std)
        """mean and population standard deviation"""
        self.min = min((e.min for e in events if e.min is not None), default=None)
        self.max = max((e.max for e in events if e.max is not None), default=None)
        self.n, self.zero = sum(e.n for e in events), sum(e.zero for e in events)
        self.nan, self.inf = sum(e.nan for e in events), sum(e.inf for e in events)


def values_of(session: Session) -> Values:
    """The statistics of each tensor in order of the computes. Raises UsageError without any."""
    if not session.stats:
        raise UsageError(f"{session.path}: no values were read; record with --stats PATTERN")
    found: Values = {}
    places: dict[tuple[int, str, str], int] = defaultdict(int)
    for event in session.stats:
        nodes = session.graphs[event.graph].nodes
        op = nodes.op[event.node] if nodes else ""
        again = event.compute, event.name, op
        read = Read(_LAYER.sub("", event.name), op, event.layer, places[again])
        places[again] += 1
        found.setdefault(read, []).append(event)
    return found


NAMES = header("tensor", "op", ("layer", "layer"))


def name_of(read: Read) -> list[Cell]:
    """Its cells of the columns NAMES."""
    again = f" #{read.place + 1}" if read.place else ""
    return [read.tensor + again, read.op, read.layer]


def compute_values(session: Session) -> Report:
    """One row for each tensor, op and layer that was read, in the order of the graph: computes,
    elements, smallest, largest, mean, deviation, and the number of NaN, infinities and zeros.

    The title says whether every value is finite. Raises UsageError if no values were read.
    """
    rows: list[list[Cell]] = []
    for read, events in values_of(session).items():
        of = Spread(events)
        figures = (of.min, of.max, of.mean, of.std, of.nan, of.inf)
        zeros = of.zero / of.n if of.n else None
        rows.append([*name_of(read), len(events), of.n, *figures, zeros])
    columns = header(
        *NAMES, ("count", "computes", "elements"), ("number", "min", "max", "mean", "std"),
        ("count", "NaN", "infinite"), ("fraction", "zeros"),
    )  # fmt: skip
    finite = "all that were read are finite"
    if bad := [event for event in session.stats if event.nan or event.inf]:
        step = dict(session.computes.tuples("compute", "step")).get(bad[0].compute, -1)
        where = f"in {bad[0].name}" + (f", step {step}" if step >= 0 else "")
        n_nan, n_inf = sum(event.nan for event in bad), sum(event.inf for event in bad)
        finite = f"{n_nan:,} NaN and {n_inf:,} infinite, first {where}"
    notes = session.log_end.notes()
    return Report(f"Values: {finite}", columns, rows, notes, labels=3, key="values")


# --- the tokens of a compute ---
# A decode computes the token that the previous step sampled. The log lacks the ids of a prompt's
# tokens, so prompts are known by their position and length alone.


class Piece(NamedTuple):
    """Consecutive tokens of one sequence."""

    request: int
    """its place in `find_requests`, -1 if none is known"""
    pos: int
    """of the first, -1 if unknown"""
    n: int
    id: int
    """of the only token, -1 if unknown"""
    text: str
    """of the only token, empty if unknown"""


@dataclass(frozen=True)
class Computed:
    """The tokens of one compute; `pieces` is empty if the log does not record the sequences."""

    n: int
    pieces: tuple[Piece, ...]

    @property
    def label(self) -> str:
        """The text of a token, or how many there are and where they begin."""
        if len(self.pieces) > 1:
            return f"{self.n:,} tokens of {len(self.pieces)} sequences"
        (piece,) = self.pieces or [Piece(-1, -1, self.n, -1, "")]
        if piece.text:
            return piece.text[:MOST_TEXT]
        where = f" from {piece.pos}" if piece.pos >= 0 else ""
        return f"{counted(piece.n, 'token')}{where}"

    @property
    def where(self) -> str:
        """The positions in the sequence, empty if they are unknown or of several sequences."""
        if len(self.pieces) != 1 or self.pieces[0].pos < 0:
            return ""
        (piece,) = self.pieces
        return f"{piece.pos}" if piece.n == 1 else f"{piece.pos}-{piece.pos + piece.n - 1}"


def computed_tokens(session: Session) -> dict[int, Computed]:
    """What each compute worked on, in the order of the log."""
    return _computed(session, *find_requests(session))


def _computed(session: Session, steps: Table, requests: list[Request]) -> dict[int, Computed]:
    pieces = _pieces(session, steps, requests)
    found: dict[int, Computed] = {}
    of_step: dict[int, list[int]] = defaultdict(list)
    computes = session.computes.tuples("compute", "step", "n_tokens", "source")
    for compute, step, n, source in computes:
        found[compute] = Computed(n, ())
        if step >= 0 and source != "memory_update":
            of_step[step].append(compute)
    for step, of in of_step.items():
        whole = pieces.get(step, [])
        if len(of) == 1:
            found[of[0]] = Computed(found[of[0]].n, tuple(whole))
        elif len(whole) == 1:
            # the ubatches of a sequence follow each other
            pos = whole[0].pos
            for compute in of:
                n = found[compute].n
                found[compute] = Computed(n, (whole[0]._replace(pos=pos, n=n),))
                pos += n if pos >= 0 else 0
    return found


def _pieces(session: Session, steps: Table, requests: list[Request]) -> dict[int, list[Piece]]:
    """What each step has of each sequence."""
    numbers = steps["step"].tolist()
    parts = parts_of_steps(session, session.steps)
    tokens = session.tokens.tuples("step", "seq", "id", "text")
    # the last token that was sampled from each step and sequence
    sampled = {(step, max(seq, 0)): (id, text) for step, seq, id, text in tokens}
    found: dict[tuple[int, int], Piece] = {}
    for number, request in enumerate(requests):
        before: tuple[int, Part] | None = None
        for step in (numbers[row] for row in request.steps):
            part = next(part for part in parts[step] if part.seq == request.seq)
            id, text = -1, ""
            if before and part.tokens == 1 and part.pos == before[1].pos + before[1].tokens:
                id, text = sampled.get((before[0], part.seq), (-1, ""))
            found[step, part.seq] = Piece(number, part.pos, part.tokens, id, text)
            before = step, part
    return {
        step: [found.get((step, of.seq), Piece(-1, of.pos, of.tokens, -1, "")) for of in batch]
        for step, batch in parts.items()
    }


@dataclass(frozen=True)
class Alike:
    """The computes of A and B that worked on the same tokens after the same tokens."""

    pairs: dict[int, int]
    """computes of A -> of B"""
    tokens: dict[int, Computed]
    """of the computes of A"""
    parted: list[str]
    """a sentence on each request whose tokens differ from some position on"""


def same_tokens(a: Session, b: Session) -> Alike:
    """Pairs the computes of the same pieces of the n-th request of each session, up to the first
    position at which the ids differ or are unknown: later values come from other tokens. Prompts
    are the same if they begin at the same position and have as many tokens."""
    found_a, found_b = find_requests(a), find_requests(b)
    of_a, of_b = _computed(a, *found_a), _computed(b, *found_b)
    until, parted = _until(_ids(of_a), found_a[1], _ids(of_b), found_b[1])
    waiting: dict[tuple[Piece, ...], list[int]] = defaultdict(list)
    for compute, pieces in _before(of_b, until):
        waiting[pieces].append(compute)
    pairs = {
        compute: waiting[pieces].pop(0)
        for compute, pieces in _before(of_a, until)
        if waiting[pieces]
    }
    return Alike(pairs, {compute: of_a[compute] for compute in pairs}, parted)


def _before(
    computes: dict[int, Computed], until: list[int]
) -> Iterator[tuple[int, tuple[Piece, ...]]]:
    """The computes that end before their requests part, with what they worked on."""
    for compute, of in computes.items():
        if of.pieces and all(
            0 <= piece.request < len(until) and 0 <= piece.pos <= until[piece.request] - piece.n
            for piece in of.pieces
        ):
            yield compute, of.pieces


_Ids = dict[tuple[int, int], Piece]


def _ids(computes: dict[int, Computed]) -> _Ids:
    """The tokens with a known id, by request and position."""
    pieces = (piece for of in computes.values() for piece in of.pieces)
    return {(piece.request, piece.pos): piece for piece in pieces if piece.id >= 0}


def _until(
    ids_a: _Ids, requests_a: list[Request], ids_b: _Ids, requests_b: list[Request]
) -> tuple[list[int], list[str]]:
    """The position at which the n-th requests part, and a sentence on each that does."""
    until, parted = [], []
    for n, (one, other) in enumerate(zip(requests_a, requests_b, strict=False)):
        of = f"Request {n + 1}: " if len(requests_a) > 1 or len(requests_b) > 1 else ""
        if (one.reused, one.prompt) != (other.reused, other.prompt):
            lengths = f"A has {counted(one.prompt, 'token')} from {one.reused}, B {other.prompt:,}"
            parted.append(f"{of}The prompts differ: {lengths} from {other.reused}.")
            until.append(0)
            continue
        pos = one.reused + one.prompt
        while (a := ids_a.get((n, pos))) and (b := ids_b.get((n, pos))):
            if a.id != b.id:
                texts = f"A has “{a.text}”, B “{b.text}”"
                parted.append(f"{of}From position {pos} on, the tokens differ: {texts}.")
                break
            pos += 1
        until.append(pos)
    return until, parted


# --- two sessions ---


def compare_values(a: Session, b: Session) -> list[Report]:
    """The tensors that both sessions read, with their mean and deviation in each; then a row for
    each compute of the same tokens, if there are any.

    `shift` is the difference of the means in deviations of A; `std B / A` is the ratio of the
    deviations. The title names the tensor with the largest shift. Notes name what only one has, and
    where the tokens part. Raises UsageError if a session read no values or none of the same
    tensors.
    """
    of_a, of_b, alike = values_of_both(a, b)
    rows: list[list[Cell]] = []
    shifts: dict[Read, float] = {}
    for read in (read for read in of_a if read in of_b):
        one, other = Spread(of_a[read]), Spread(of_b[read])
        shift = shift_of(one, other)
        if shift is not None:
            shifts[read] = abs(shift)
        rows.append([
            *name_of(read), one.mean, other.mean, one.std, other.std, shift,
            _ratio(other.std, one.std), one.nan + one.inf, other.nan + other.inf,
        ])  # fmt: skip
    columns = header(
        *NAMES, ("number", "mean A", "mean B", "std A", "std B", "shift"), ("ratio", "std B / A"),
        ("count", "not finite A", "not finite B"),
    )  # fmt: skip
    title = "Values of B against A"
    figures: Figures = {}
    if shifts:
        most = max(shifts, key=lambda read: shifts[read])
        figures["largest shift"] = (shifts[most], "number")
        size = shown(shifts[most], "number")
        title += f": means differ by up to {size} deviations, in {_words(most)}"
    notes = [f"A is {a.path}, B is {b.path}."]
    for name, these, those in (("A", of_a, of_b), ("B", of_b, of_a)):
        if only := [read for read in these if read not in those]:
            n = counted(len(only), "tensor")
            notes.append(f"Only in {name}: {n}, such as {_words(only[0])}.")
    extent = "No compute has the same tokens in both: use the same prompt. All computes count."
    if alike.pairs:
        n = counted(len(alike.pairs), "compute")
        n_a, n_b = (len({event.compute for event in of.stats}) for of in (a, b))
        extent = f"{n} of the same tokens: A has {n_a:,} in all, B {n_b:,}."
    notes += [extent, *alike.parted, *a.log_end.notes(), *b.log_end.notes()]
    by_tensor = Report(title, columns, rows, notes, figures=figures, labels=3, key="values")
    return [by_tensor, *([_by_token(of_a, of_b, alike)] if alike.pairs else [])]


def values_of_both(a: Session, b: Session) -> tuple[Values, Values, Alike]:
    """The statistics of both sessions: those of the computes of the same tokens, in the same order,
    if there are any; else all. Raises UsageError if the sessions read none of the same tensors."""
    of_a, of_b = values_of(a), values_of(b)
    if not of_a.keys() & of_b.keys():
        raise UsageError(f"{a.path} and {b.path} read no values of the same tensors")
    alike = same_tokens(a, b)
    if alike.pairs:
        of_a = _chosen(of_a, {compute: i for i, compute in enumerate(alike.pairs)})
        of_b = _chosen(of_b, {compute: i for i, compute in enumerate(alike.pairs.values())})
    return of_a, of_b, alike


def shift_of(one: Spread | TensorStats, other: Spread | TensorStats) -> float | None:
    """The difference of the means in deviations of `one`; None if it is not known."""
    if one.mean is None or other.mean is None:
        return None
    return _ratio(known(other.mean - one.mean), one.std)


def _chosen(values: Values, order: Mapping[int, int]) -> Values:
    """The events of some computes, in their order; without the tensors that these did not have."""
    chosen = {
        read: sorted((e for e in of if e.compute in order), key=lambda e: order[e.compute])
        for read, of in values.items()
    }
    return {read: of for read, of in chosen.items() if of}


def _by_token(of_a: Values, of_b: Values, alike: Alike) -> Report:
    """One row for each pair of computes: the tensor with the largest shift, and the median ratio of
    the deviations of all tensors."""
    named: dict[int, list[tuple[Read, TensorStats, TensorStats]]] = {}
    for read in (read for read in of_a if read in of_b):
        others = {event.compute: event for event in of_b[read]}
        for event in of_a[read]:
            if (other := others.get(alike.pairs[event.compute])) is not None:
                named.setdefault(event.compute, []).append((read, event, other))
    rows: list[list[Cell]] = []
    for compute, tokens in alike.tokens.items():
        of = named.get(compute, [])
        shifts = {read: shift_of(one, other) for read, one, other in of}
        known = {read: shift for read, shift in shifts.items() if shift is not None}
        most = max(known, key=lambda read: abs(known[read])) if known else None
        every = (_ratio(other.std, one.std) for _, one, other in of)
        ratios = [ratio for ratio in every if ratio is not None]
        rows.append([
            tokens.where, tokens.label, known[most] if most else None,
            *(name_of(most) if most else ["", "", None]),
            statistics.median(ratios) if ratios else None,
        ])  # fmt: skip
    columns = header(
        "position", "token", ("number", "largest shift"), *NAMES, ("ratio", "std B / A, median")
    )
    notes = [
        "A row is a compute of the same tokens in both. A prompt has one row, or one for each"
        " ubatch; the last layer then computes only the tokens whose logits are requested."
    ]
    return Report("B against A, token by token", columns, rows, notes, labels=2)


def _words(read: Read) -> str:
    return read.tensor + (f" of layer {read.layer}" if read.layer >= 0 else "")


def _ratio(x: float | None, y: float | None) -> float | None:
    return None if x is None or not y else known(x / y)


# --- maps ---


def map_values(session: Session) -> list[Chart]:
    """A map for each tensor that was read in several layers: a row for each layer, a column for
    each compute with the text of its token, coloured by the standard deviation. At most MOST_MAPS.
    Raises UsageError if no values were read."""
    values = values_of(session)
    tokens = computed_tokens(session)
    read = sorted({event.compute for event in session.stats})
    cells = {of: {e.compute: e.std for e in events} for of, events in values.items()}
    return _maps("standard deviation", {compute: tokens[compute] for compute in read}, cells)


def map_shifts(a: Session, b: Session) -> list[Chart]:
    """Like `map_values`, for the computes of the same tokens in both sessions, coloured by the
    difference of the means in deviations of A, without its sign. Raises UsageError if the sessions
    read none of the same tensors."""
    of_a, of_b, alike = values_of_both(a, b)
    cells: dict[Read, dict[int, float | None]] = {}
    for read in of_a:
        others = {event.compute: event for event in of_b.get(read, ())}
        for event in of_a[read] if alike.pairs else ():
            other = others.get(alike.pairs[event.compute])
            shift = shift_of(event, other) if other is not None else None
            cells.setdefault(read, {})[event.compute] = None if shift is None else abs(shift)
    what = "difference of the means, B against A, in deviations of A"
    return _maps(what, alike.tokens, cells)


def _maps(
    what: str, tokens: dict[int, Computed], cells: dict[Read, dict[int, float | None]]
) -> list[Chart]:
    """The maps of tensors by layer and compute; `tokens` has those of each compute."""
    reads_of = grouped(
        (read for read in cells if read.layer >= 0), lambda read: (read.tensor, read.op, read.place)
    )
    drawn = {compute: of.label for compute, of in list(tokens.items())[:MOST_COLUMNS]}
    charts: list[Chart] = []
    for (tensor, op, _), reads in reads_of.items():
        if len(reads) > 1 and len(charts) < MOST_MAPS:
            reads.sort(key=lambda read: read.layer)
            rows = [[cells[read].get(compute) for compute in drawn] for read in reads]
            layers = [shown(read.layer, "layer") for read in reads]
            title = f"{tensor}{f' ({op})' if op else ''}: {what}"
            charts.append(map_by_layer(title, AXIS, layers, rows, list(drawn.values())))
    return charts
