"""The tokens that computes worked on, of batches that are written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamacpp_instr.converters.analyses.values import (
    Computed,
    Piece,
    computed_tokens,
    same_tokens,
)
from llamacpp_instr.log import schema as s
from llamacpp_instr.log.session import Session
from tests.kit.batched_log import Batch, batched_log
from tests.kit.reports import session_of

TWO_PROMPTS = Batch([(0, 0, 4), (1, 0, 3)], sampled=[(0, 11, "a"), (1, 21, "b")])
THEIR_TOKENS = Batch([(0, 4, 1), (1, 3, 1)], sampled=[(0, 12, "c"), (1, 22, "d")])


def session(tmp_path: Path, *batches: Batch, name: str = "a") -> Session:
    return session_of(tmp_path / f"{name}.log", batched_log(batches))


def test_a_batch_has_a_piece_of_each_of_its_sequences(tmp_path: Path) -> None:
    found = computed_tokens(session(tmp_path, TWO_PROMPTS, THEIR_TOKENS))
    assert found == {
        0: Computed(7, (Piece(0, 0, 4, -1, ""), Piece(1, 0, 3, -1, ""))),
        1: Computed(2, (Piece(0, 4, 1, 11, "a"), Piece(1, 3, 1, 21, "b"))),
    }


def test_ubatches_of_several_sequences_have_no_pieces(tmp_path: Path) -> None:
    """The log does not tell which ubatch has tokens of which sequence."""
    split = Batch([(0, 0, 4), (1, 0, 3)], computes=[5, 2])
    assert computed_tokens(session(tmp_path, split)) == {0: Computed(5, ()), 1: Computed(2, ())}


def test_ubatches_of_one_sequence_follow_each_other(tmp_path: Path) -> None:
    found = computed_tokens(session(tmp_path, Batch([(0, 7, 6)], computes=[3, 2, 1])))
    pieces = [of.pieces for of in found.values()]
    assert pieces == [
        (Piece(0, 7, 3, -1, ""),),
        (Piece(0, 10, 2, -1, ""),),
        (Piece(0, 12, 1, -1, ""),),
    ]


def test_computes_outside_of_steps_have_no_pieces(tmp_path: Path) -> None:
    events = batched_log([Batch([(0, 0, 4)], computes=[4, 4, 4])])
    computes = [event for event in events if isinstance(event, s.Compute)]
    computes[1].step, computes[2].source = -1, "memory_update"
    found = computed_tokens(session_of(tmp_path / "a.log", events))
    assert [of.n for of in found.values()] == [4, 4, 4]
    assert [len(of.pieces) for of in found.values()] == [1, 0, 0]


@pytest.mark.parametrize(
    ("later", "known"),
    [
        (Batch([(0, 4, 1)]), (11, "a")),
        (Batch([(0, 5, 1)]), (-1, "")),
        (Batch([(0, 3, 1)]), (-1, "")),
        (Batch([(0, 4, 2)]), (-1, "")),
    ],
    ids=["the next position", "a gap", "the position before", "a draft"],
)
def test_a_single_token_at_the_next_position_is_the_sampled_one(
    later: Batch, known: tuple[int, str], tmp_path: Path
) -> None:
    first = Batch([(0, 0, 4)], sampled=[(0, 11, "a")])
    found = computed_tokens(session(tmp_path, first, later))
    (piece,) = found[1].pieces
    assert (piece.id, piece.text) == known


def test_a_prompt_of_one_token_has_no_text(tmp_path: Path) -> None:
    (piece,) = computed_tokens(session(tmp_path, Batch([(0, 0, 1)])))[0].pieces
    assert piece == Piece(0, 0, 1, -1, "")


def test_tokens_of_a_failed_step_are_of_no_request(tmp_path: Path) -> None:
    failed = Batch([(0, 0, 4)], status=1)
    (piece,) = computed_tokens(session(tmp_path, failed))[0].pieces
    assert piece == Piece(-1, 0, 4, -1, "")


# --- two sessions ---


def test_a_batch_is_paired_until_one_of_its_requests_parts(tmp_path: Path) -> None:
    third = Batch([(0, 5, 1), (1, 4, 1)])
    other = Batch([(0, 4, 1), (1, 3, 1)], sampled=[(0, 12, "c"), (1, 29, "x")])
    a = session(tmp_path, TWO_PROMPTS, THEIR_TOKENS, third)
    b = session(tmp_path, TWO_PROMPTS, other, third, name="b")
    found = same_tokens(a, b)
    assert found.pairs == {0: 0, 1: 1}
    assert list(found.tokens) == [0, 1]
    difference = "From position 4 on, the tokens differ: A has “d”, B “x”."
    assert found.parted == [f"Request 2: {difference}"]


def test_the_sentence_on_the_only_request_does_not_number_it(tmp_path: Path) -> None:
    a = session(tmp_path, Batch([(0, 0, 4)]))
    b = session(tmp_path, Batch([(0, 0, 5)]), name="b")
    assert same_tokens(a, b).parted == ["The prompts differ: A has 4 tokens from 0, B 5 from 0."]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_request_is_numbered_if_one_side_has_several(swapped: bool, tmp_path: Path) -> None:
    a = session(tmp_path, Batch([(0, 0, 4), (1, 0, 3)]))
    b = session(tmp_path, Batch([(0, 0, 5)]), name="b")
    sides = (b, a) if swapped else (a, b)
    difference = "A has 5 tokens from 0, B 4" if swapped else "A has 4 tokens from 0, B 5"
    found = same_tokens(*sides)
    assert found.parted == [f"Request 1: The prompts differ: {difference} from 0."]
    assert found.pairs == {}, "the other request has no counterpart"


def test_prompts_that_begin_elsewhere_differ(tmp_path: Path) -> None:
    a = session(tmp_path, Batch([(0, 0, 4)]))
    b = session(tmp_path, Batch([(0, 2, 4)]), name="b")
    found = same_tokens(a, b)
    assert found.parted == ["The prompts differ: A has 4 tokens from 0, B 4 from 2."]
    assert found.pairs == {}


def test_each_compute_is_paired_once(tmp_path: Path) -> None:
    """A position that is computed again is a second pair."""
    again = Batch([(0, 0, 4)])
    found = same_tokens(session(tmp_path, again), session(tmp_path, again, again, name="b"))
    assert found.pairs == {0: 0}


def test_what_is_computed_after_the_known_ids_is_not_paired(tmp_path: Path) -> None:
    """The ids at 4 are unknown, so whatever comes later may differ."""
    batches = [Batch([(0, 0, 4)]), Batch([(0, 4, 1)])]
    found = same_tokens(session(tmp_path, *batches), session(tmp_path, *batches, name="b"))
    assert found.pairs == {0: 0}
    assert found.parted == []


def test_requests_after_one_with_another_prompt_are_paired(tmp_path: Path) -> None:
    later = Batch([(1, 0, 3)])
    a = session(tmp_path, Batch([(0, 0, 4)]), later)
    b = session(tmp_path, Batch([(0, 0, 5)]), later, name="b")
    found = same_tokens(a, b)
    assert found.pairs == {1: 1}
    assert len(found.parted) == 1
