"""What a log says about the cells that tokens see, against caches simulated cell by cell."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from llamacpp_instr.log import schema as s
from llamacpp_instr.log.batches import Caches
from llamacpp_instr.log.graph.attention import Seen, Span, Ubatch
from tests.kit.made_log import make_log

SIZE = 64
Part = tuple[int, int]
"""a sequence and its number of tokens"""


def caches_of(n_seq_max: int = 4, arch: str = "llama", **hparams: int) -> Caches:
    events = make_log(Random(1).randint, 1, "verbose")
    (context,) = (e for e in events if isinstance(e, s.Context))
    (model,) = (e for e in events if isinstance(e, s.Model))
    return Caches(
        replace(context, n_seq_max=n_seq_max), replace(model, arch=arch, hparams=dict(hparams))
    )


@dataclass
class Cache:
    """A cache whose cells are known, and what a log of its changes says about it."""

    caches: Caches
    cells: dict[int, tuple[set[int], int]] = field(default_factory=dict)
    """sequences and position, by the cell"""
    n_steps: int = 0
    verbose: bool = False

    def length(self, seq: int) -> int:
        return max((pos for seqs, pos in self.cells.values() if seq in seqs), default=-1) + 1

    def change(self, op: str, **of: Any) -> None:
        """Report that the cells have changed."""
        used = len(self.cells)
        self.caches.take(s.Kv(t=0, ctx=0, op=op, used=used, size=SIZE, bytes=0, n_kv=0, **of))

    def remove(self, seq: int, p0: int = -1, p1: int = -1, op: str = "seq_rm") -> None:
        for cell, (seqs, pos) in list(self.cells.items()):
            last = 10**9 if p1 < 0 else p1
            gone = seqs - {seq} if op == "seq_keep" else seqs & ({seq} if seq >= 0 else seqs)
            if op != "seq_rm" or max(p0, 0) <= pos < last:
                seqs -= gone if op != "clear" else set(seqs)
            if not seqs:
                del self.cells[cell]
        more = {"seq": seq, "p0": p0, "p1": p1} if op == "seq_rm" else {"seq": seq}
        self.change(op, **({} if op == "clear" else more))

    def copy(self, seq: int, to: int) -> None:
        for seqs, _ in self.cells.values():
            if seq in seqs:
                seqs.add(to)
        self.change("seq_cp", seq=seq, seq_dst=to, p0=-1, p1=-1)

    def move(self, seq: int, by: int) -> None:
        for cell, (seqs, pos) in self.cells.items():
            if seq in seqs:
                self.cells[cell] = seqs, pos + by
        self.change("seq_add", seq=seq, p0=0, p1=-1, arg=by)

    def step(self, *parts: Part, ubatch: int = SIZE) -> list[Seen]:
        """Compute the next tokens of these sequences, in ubatches of one sequence. Check what the
        log says about them, and return it."""
        firsts = [self.length(seq) for seq, _ in parts]
        begin = s.StepBegin(
            t=0, step=self.n_steps, ctx=0, kind="decode", phase="decode",
            n_tokens=sum(n for _, n in parts), n_outputs=1, n_seqs=len(parts), pos=min(firsts),
            seq=[seq for seq, _ in parts], seq_pos=firsts, seq_tokens=[n for _, n in parts],
        )  # fmt: skip
        self.n_steps += 1
        tokens = [(seq, first + i) for (seq, n), first in zip(parts, firsts, strict=True)
                  for i in range(n)]  # fmt: skip
        found = []
        for at in range(0, len(tokens), ubatch):
            of = tokens[at : at + ubatch]
            free = [cell for cell in range(SIZE) if cell not in self.cells][: len(of)]
            for cell, (seq, pos) in zip(free, of, strict=True):
                self.cells[cell] = {seq}, pos
            self.change("apply", step=begin.step, cells=free if self.verbose else None)
            computed = self.caches.compute(compute_of(len(of), begin.step), begin)
            found.append(self.check(computed, of))
        return found

    def check(self, ubatch: Ubatch, tokens: list[tuple[int, int]]) -> Seen:
        (seen,) = ubatch.caches
        assert (seen.used, seen.size) == (len(self.cells), SIZE)
        if seen.spans:
            counts = [first + i + 1 for first, n in seen.spans for i in range(n)]
            assert counts == [
                sum(seq in seqs and at <= pos for seqs, at in self.cells.values())
                for seq, pos in tokens
            ]
        if seen.dense:
            for seq, pos in tokens:
                there = {at for seqs, at in self.cells.values() if seq in seqs}
                assert set(range(pos + 1)) <= there
        if seen.in_order:
            assert all(cell == pos for cell, (_, pos) in self.cells.items())
        return seen


def compute_of(n_tokens: int, step: int) -> s.Compute:
    return s.Compute(
        t=0, compute=0, graph=0, ctx=0, step=step, source="decode", reused=True, n_threads=1,
        n_tokens=n_tokens, dur=1,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("n_seq_max", [1, 3])
def test_what_is_known_of_any_cache_is_true(n_seq_max: int, seed: int) -> None:
    random = Random(seed)
    cache = Cache(caches_of(n_seq_max), verbose=seed % 3 == 0)
    for _ in range(60):
        seq, what = random.randrange(n_seq_max), random.random()
        free = SIZE - len(cache.cells)
        if what < 0.7 and free:
            several = random.sample(range(n_seq_max), random.randint(1, n_seq_max))
            parts = [(of, random.choice([1, 1, 1, 5])) for of in several]
            if sum(n for _, n in parts) <= free:
                ubatch = random.choice([SIZE, 2]) if len(parts) == 1 else SIZE
                cache.step(*parts, ubatch=ubatch)
        elif what < 0.8:
            cache.remove(random.choice([seq, seq, -1]), random.randrange(12) - 1)
        elif what < 0.85:
            first = random.randrange(8)
            cache.remove(seq, first, first + random.randrange(1, 4))
        elif what < 0.9:
            cache.remove(seq, op="seq_keep")
        elif what < 0.95:
            cache.remove(-1, op="clear")
        elif n_seq_max > 1 and what < 0.97:
            cache.copy(seq, (seq + 1) % n_seq_max)
        elif cache.length(seq):
            cache.move(seq, random.choice([1, 3]))


def spans(seen: Seen) -> list[tuple[int, int]]:
    return [tuple(span) for span in seen.spans]


def test_a_sequence_from_its_start_is_known() -> None:
    cache = Cache(caches_of())
    (seen,) = cache.step((0, 8))
    assert seen == Seen(8, (Span(0, 8),), dense=True, in_order=True, size=SIZE)
    (seen,) = cache.step((0, 1))
    assert seen == Seen(9, (Span(8, 1),), dense=True, in_order=True, size=SIZE)
    first, second = cache.step((0, 5), ubatch=3)
    assert (spans(first), spans(second)) == ([(9, 3)], [(12, 2)])
    cache.remove(0, 10)
    (seen,) = cache.step((0, 2))
    assert seen == Seen(12, (Span(10, 2),), dense=True, in_order=True, size=SIZE)
    cache.remove(-1, op="clear")
    (seen,) = cache.step((2, 4))
    assert seen == Seen(4, (Span(0, 4),), dense=True, in_order=True, size=SIZE)


def test_several_sequences_are_known_by_their_lengths() -> None:
    cache = Cache(caches_of())
    cache.step((0, 8))
    cache.step((1, 3))
    (seen,) = cache.step((0, 1), (1, 2))
    assert (spans(seen), seen.dense) == ([(8, 1), (3, 2)], False)
    cache.remove(1, 4)
    (seen,) = cache.step((0, 1), (1, 2))
    assert spans(seen) == [(9, 1), (4, 2)]
    cache.remove(0, op="seq_keep")
    (seen,) = cache.step((0, 1), (1, 1))
    assert spans(seen) == [(10, 1), (0, 1)]
    cache.remove(-1, 5)
    (seen,) = cache.step((0, 2), (1, 1))
    assert spans(seen) == [(5, 2), (1, 1)]


def test_a_sequence_in_several_ubatches_has_its_length() -> None:
    cache = Cache(caches_of())
    cache.step((0, 8))
    cache.step((0, 5), ubatch=3)
    cache.step((1, 3))
    (seen,) = cache.step((0, 1), (1, 1))
    assert spans(seen) == [(13, 1), (3, 1)]


def test_cells_behind_a_window_are_taken_again() -> None:
    """Positions are then no longer in the cells of the same numbers; none that is seen is lost."""
    cache = Cache(caches_of(arch="gemma3", n_swa=4))
    cache.step((0, 8))
    begin = s.StepBegin(
        t=0, step=9, ctx=0, kind="decode", phase="decode", n_tokens=2, n_outputs=1, n_seqs=1,
        pos=8, seq=[0], seq_pos=[8], seq_tokens=[2],
    )  # fmt: skip
    cache.change("apply", step=9)  # as many as before
    (seen,) = cache.caches.compute(compute_of(2, 9), begin).caches
    assert (seen.used, spans(seen), seen.dense, seen.in_order) == (8, [(8, 2)], True, False)


def test_the_only_sequence_sees_all_cells_even_once_some_were_removed() -> None:
    cache = Cache(caches_of(n_seq_max=1))
    cache.step((0, 10))
    cache.remove(0, 2, 6)
    (seen,) = cache.step((0, 3))
    assert (spans(seen), seen.dense, seen.in_order) == ([(6, 3)], False, False)
    several = Cache(caches_of(n_seq_max=2))
    several.step((0, 10))
    several.remove(0, 2, 6)
    (seen,) = several.step((0, 3))
    assert spans(seen) == []


def test_cells_that_the_log_names_may_be_out_of_order() -> None:
    cache = Cache(caches_of(), verbose=True)
    cache.step((0, 8))
    cells = {7 - cell: ({0}, pos) for cell, (_, pos) in cache.cells.items()}  # llama.cpp may do so
    cache.remove(-1, op="clear")
    cache.cells = cells
    begin = s.StepBegin(
        t=0, step=9, ctx=0, kind="decode", phase="prefill", n_tokens=8, n_outputs=1, n_seqs=1,
        pos=0, seq=[0], seq_pos=[0], seq_tokens=[8],
    )  # fmt: skip
    cache.change("apply", step=9, cells=list(range(7, -1, -1)))
    seen = cache.check(cache.caches.compute(compute_of(8, 9), begin), [(0, i) for i in range(8)])
    assert (spans(seen), seen.dense, seen.in_order) == ([(0, 8)], True, False)


STEPS = count()


def next_step(
    caches: Caches, n: int, used: int, pos: int = -1, n_seqs: int = 1, **more: Any
) -> Seen:
    """What `n` tokens of the next step see, without columns of sequences."""
    step = next(STEPS)
    begin = s.StepBegin(
        t=0, step=step, ctx=0, kind="decode", phase="decode", n_tokens=n, n_outputs=1,
        n_seqs=n_seqs, pos=pos,
    )  # fmt: skip
    caches.take(s.Kv(t=0, ctx=0, step=step, op="apply", used=used, size=SIZE, **more))
    (seen,) = caches.compute(compute_of(n, step), begin).caches
    return seen


def test_positions_that_llama_cpp_chooses_follow_those_in_the_cache() -> None:
    caches = caches_of()
    assert next_step(caches, 3, 3) == Seen(3, (Span(0, 3),), dense=True, in_order=True, size=SIZE)
    assert next_step(caches, 2, 5) == Seen(5, (Span(3, 2),), dense=True, in_order=True, size=SIZE)
    assert next_step(caches, 1, 6, pos=5) == Seen(6, (Span(5, 1),), True, True, SIZE)
    assert next_step(caches_of(), 2, 9) == Seen(9, size=SIZE), "the cache was not empty"


def test_a_position_that_does_not_follow_is_not_known() -> None:
    caches = caches_of()
    next_step(caches, 3, 3, pos=0)
    assert next_step(caches, 2, 5, pos=4) == Seen(5, size=SIZE)
    assert next_step(caches, 2, 7, pos=6) == Seen(7, size=SIZE), "nor are later ones"
    assert next_step(caches_of(), 3, 3, pos=1) == Seen(3, size=SIZE), "a first one that is not 0"


def test_tokens_of_several_sequences_without_columns_are_not_known() -> None:
    caches = caches_of()
    next_step(caches, 3, 3)
    assert next_step(caches, 2, 5, n_seqs=2) == Seen(5, size=SIZE)


def test_a_compute_outside_of_steps_has_no_tokens_of_a_sequence() -> None:
    caches = caches_of(1)
    next_step(caches, 3, 3)
    caches.take(s.Kv(t=0, ctx=0, op="apply", used=5, size=SIZE))
    ubatch = caches.compute(compute_of(2, -1), None)
    assert (ubatch.alone, ubatch.caches) == ((), (Seen(5, size=SIZE),))


def test_the_tokens_of_one_sequence_see_each_other() -> None:
    caches = caches_of()
    for n_seqs, alone in ((1, (Span(0, 4),)), (2, ())):
        begin = s.StepBegin(
            t=0, step=n_seqs, ctx=0, kind="encode", phase="encode", n_tokens=4, n_outputs=1,
            n_seqs=n_seqs, pos=0,
        )  # fmt: skip
        ubatch = caches.compute(compute_of(4, n_seqs), begin)
        assert (ubatch.alone, ubatch.n_tokens, ubatch.n_threads) == (alone, 4, 1)
        assert ubatch.causal


@pytest.mark.parametrize(("n", "used", "known"), [(2, 5, True), (2, 6, False), (2, 2, False)])
def test_a_ubatch_may_take_as_many_cells_as_it_has_tokens(n: int, used: int, known: bool) -> None:
    """Three cells are in use before it. If it leaves two, others were removed unseen."""
    caches = caches_of()
    next_step(caches, 3, 3)
    assert next_step(caches, n, used, pos=3).dense is known


def test_fewer_cells_than_before_are_not_those_of_a_window() -> None:
    caches = caches_of()
    next_step(caches, 6, 6)
    assert not next_step(caches, 2, 5, pos=6).dense
    caches = caches_of()
    next_step(caches, 6, 6)
    assert next_step(caches, 2, 6, pos=6).dense


def test_caches_come_in_their_order_and_a_state_is_none() -> None:
    caches = caches_of()
    for cache, used, kind in ((1, 4, "kv"), (0, 3, "kv"), (2, 9, "recurrent")):
        caches.take(
            s.Kv(t=0, ctx=0, step=0, cache=cache, kind=kind, op="apply", used=used, size=SIZE)
        )
    seen = caches.compute(compute_of(3, -1), None).caches
    assert [of.used for of in seen] == [3, 4]
    assert caches.compute(compute_of(3, -1), None).caches == (), "nothing was taken since"


def change(caches: Caches, op: str, used: int, **of: Any) -> None:
    caches.take(s.Kv(t=0, ctx=0, op=op, used=used, size=SIZE, **of))


@pytest.mark.parametrize(
    ("op", "of", "used", "follows"),
    [
        ("seq_rm", {"seq": 0, "p0": 4, "p1": -1}, 4, 4),
        ("seq_rm", {"seq": 0, "p0": 4, "p1": None}, 4, 4),
        ("seq_rm", {"seq": 0, "p0": 4, "p1": 6}, 4, None),
        ("seq_rm", {"seq": 0, "p0": 4, "p1": 0}, 4, None),
        ("seq_rm", {"seq": 0, "p0": 4, "p1": -1}, 5, None),
        ("seq_rm", {"seq": 0, "p0": None, "p1": -1}, 4, None),
        ("seq_rm", {"seq": 0, "p0": 9, "p1": -1}, 6, 6),
        ("seq_keep", {"seq": 0}, 6, 6),
        ("seq_keep", {"seq": 0}, 5, None),
        ("seq_keep", {"seq": 1}, 0, 0),
        ("clear", {}, 0, 0),
        ("seq_rm", {"seq": -1, "p0": -1, "p1": -1}, 0, 0),
        ("seq_add", {"seq": 0, "p0": 0, "p1": -1, "arg": 1}, 6, None),
        ("seq_cp", {"seq": 0, "seq_dst": 1, "p0": -1, "p1": -1}, 6, None),
    ],
)
def test_which_position_follows_after_a_change(
    op: str, of: dict[str, Any], used: int, follows: int | None
) -> None:
    """One sequence has six cells. If the position is unknown, so is what the next token sees."""
    caches = caches_of()
    next_step(caches, 6, 6)
    change(caches, op, used, **of)
    seen = next_step(caches, 1, used + 1)
    assert seen.dense is (follows is not None)
    assert seen.spans == ((Span(follows, 1),) if follows is not None else ())


def test_a_change_between_the_taking_of_cells_and_its_compute_makes_them_unknown() -> None:
    """The compute never came."""
    caches = caches_of()
    next_step(caches, 6, 6)
    change(caches, "apply", 8)
    change(caches, "seq_rm", 6, seq=0, p0=6, p1=-1)
    assert not next_step(caches, 1, 7).dense
    caches = caches_of()
    next_step(caches, 6, 6)
    change(caches, "apply", 8)
    change(caches, "clear", 0)
    assert next_step(caches, 1, 1).dense


@pytest.mark.parametrize(
    ("cells", "in_order"),
    [(None, True), ([3, 4], True), ([4, 3], False), ([3], False), ([2, 3], False)],
)
def test_cells_that_are_named_are_those_behind_the_last(
    cells: list[int] | None, in_order: bool
) -> None:
    caches = caches_of()
    next_step(caches, 3, 3)
    seen = next_step(caches, 2, 5, cells=cells)
    assert (seen.spans, seen.dense, seen.in_order) == ((Span(3, 2),), True, in_order)


@pytest.mark.parametrize(
    ("hparams", "arch", "window", "uniform"),
    [
        ({}, "llama", 0, True), ({"n_swa": 512}, "gemma3", 512, True),
        ({"n_swa": 0}, "llama", 0, True), ({"n_swa": 8192}, "llama4", 8192, False),
        ({"n_swa": 1}, "gemma-embedding", 1, False), ({"n_swa": -1}, "modern-bert", 0, False),
    ],
)  # fmt: skip
def test_a_window_is_that_of_the_model(
    hparams: dict[str, int], arch: str, window: int, uniform: bool
) -> None:
    ubatch = caches_of(arch=arch, **hparams).compute(compute_of(1, -1), None)
    assert (ubatch.window, ubatch.uniform, ubatch.caches) == (window, uniform, ())
