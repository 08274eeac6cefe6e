"""The tokens that each compute worked on, and the computes of two sessions with the same tokens.

A decode computes the token that the step before it sampled. The log does not have the ids of a
prompt's tokens, so prompts are known by their position and length alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.log.batches import Part
from llamacpp_instr.log.requests import Request, find_requests, parts_of_steps
from llamacpp_instr.log.session import Session, Table

MOST_TEXT = 24
"""characters shown of one token"""


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
    of_step: dict[int, list[tuple[int, int]]] = defaultdict(list)
    found: dict[int, Computed] = {}
    for compute, step, n, source in session.computes.tuples(
        "compute", "step", "n_tokens", "source"
    ):
        found[compute] = Computed(n, ())
        if step >= 0 and source != "memory_update":
            of_step[step].append((compute, n))
    for step, of in of_step.items():
        whole = pieces.get(step, [])
        if len(of) == 1:
            found[of[0][0]] = Computed(of[0][1], tuple(whole))
        elif len(whole) == 1:
            # the ubatches of a sequence follow each other
            pos = whole[0].pos
            for compute, n in of:
                found[compute] = Computed(n, (whole[0]._replace(pos=pos, n=n),))
                pos += n if pos >= 0 else 0
    return found


def _pieces(session: Session, steps: Table, requests: list[Request]) -> dict[int, list[Piece]]:
    """What each step has of each sequence."""
    numbers = steps["step"].tolist()
    parts = parts_of_steps(session, session.steps)
    sampled = _sampled(session)
    known: dict[tuple[int, int], Piece] = {}
    for number, request in enumerate(requests):
        before: tuple[int, Part] | None = None
        for step in (numbers[row] for row in request.steps):
            part = next(part for part in parts[step] if part.seq == request.seq)
            id, text = -1, ""
            if before and part.tokens == 1 and part.pos == before[1].pos + before[1].tokens:
                id, text = sampled.get((before[0], part.seq), (-1, ""))
            known[step, part.seq] = Piece(number, part.pos, part.tokens, id, text)
            before = step, part
    return {
        step: [known.get((step, of.seq), Piece(-1, of.pos, of.tokens, -1, "")) for of in batch]
        for step, batch in parts.items()
    }


def _sampled(session: Session) -> dict[tuple[int, int], tuple[int, str]]:
    """Id and text of the last token that was sampled from each step, by step and sequence."""
    tokens = session.tokens.tuples("step", "seq", "id", "text")
    return {(step, max(seq, 0)): (id, text) for step, seq, id, text in tokens}


# --- two sessions ---


@dataclass(frozen=True)
class Alike:
    """The computes of A and B that worked on the same tokens after the same tokens."""

    pairs: dict[int, int]
    """computes of A -> of B"""
    tokens: dict[int, Computed]
    """of the computes of A"""
    parted: list[str]
    """a sentence on each request whose tokens differ from somewhere on"""


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
    """The computes of requests that end before these part, with what they worked on."""
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
                parted.append(f"{of}From position {pos} on the tokens differ: {texts}.")
                break
            pos += 1
        until.append(pos)
    return until, parted
