"""Breakpoints and their conditions, as a user writes them."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.graph import Node
from llamacpp_instr.debugger.stop import Breakpoint
from llamacpp_instr.debugger.tensors import Condition
from llamacpp_instr.log.graph.ops import Block

VALUES = np.array([-3.0, 0.0, 1.0, np.nan, 2.0, -np.inf], np.float32)


def node(name: str, op: str = "MUL_MAT", layer: int = 3, block: Block = "attention") -> Node:
    return Node(0, name, op, layer, block, "F32", (4,), (), "", {}, True, 0)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("nan", True),
        ("inf", True),
        ("nan == 1", True),
        ("zero > 1", False),
        ("absmax > 2.5", True),
        ("absmax > 3", False),
        ("min <= -3 and max >= 2", True),
        ("mean < 0 and max > 5", False),
        ("mean > 5 or std > 1", True),
        ("mean > 5 or std > 1 and max < 0", False),
    ],
)
def test_a_condition_compares_figures_of_the_finite_values(text: str, holds: bool) -> None:
    assert Condition.parse(text).holds(VALUES) is holds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("absmx > 1", "'absmx > 1' is not a comparison"),
        ("absmax", "compare absmax with a number"),
        ("absmax > tall", "'tall' is not a number"),
        ("__import__('os')", "is not a comparison"),
        ("mean < 0 and", "is not a comparison"),
    ],
)
def test_anything_else_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=r"condition ") as refused:
        Condition.parse(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@given(st.text(max_size=60))
def test_no_text_of_a_breakpoint_does_more_than_be_refused(text: str) -> None:
    with suppress(UsageError):
        Breakpoint.parse(text).matches(node("Qcur-3"))


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("Qcur-3", True),
        ("Qcur-*", True),
        ("qcur-*", False),
        ("Qcur", False),
        ("op=mul_mat", True),
        ("op=ADD", False),
        ("layer=3", True),
        ("layer=4-6", False),
        ("block=attention layer=2-3 Q*", True),
        ("block=norm", False),
    ],
)
def test_a_pattern_and_filters_choose_nodes(text: str, matches: bool) -> None:
    assert Breakpoint.parse(text).matches(node("Qcur-3")) is matches


def test_a_view_never_stops_because_no_kernel_runs_for_it() -> None:
    view = Node(0, "v", "VIEW", 0, "attention", "F32", (4,), (), "", {}, False, 0)
    assert not Breakpoint.parse("*").matches(view)


def test_hits_count_only_when_the_condition_holds() -> None:
    point = Breakpoint.parse("* hits=2 if max > 1")
    calm, wild = np.zeros(3), np.full(3, 2.0)
    assert [point.reached(lambda v=v: v) for v in (calm, wild, calm, wild, wild)] == [  # type: ignore[misc]
        False, False, False, True, True,
    ]  # fmt: skip
    assert point.hits == 3


def test_steps_and_tokens_restrict_it_to_some_computes() -> None:
    point = Breakpoint.parse("* step=2-3 token=7")
    at = frozenset({6, 7})
    assert point.applies(2, at)
    assert not point.applies(4, at)
    assert not point.applies(2, frozenset({8}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a pattern"),
        ("block=brain", "block is one of embedding, attention"),
        ("layer=x", "layer is a number or a range like 3-5"),
        ("colour=red", "'colour' is not one of op, block, layer, step, token, hits"),
        ("'a", "No closing quotation"),
    ],
)
def test_a_wrong_word_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        Breakpoint.parse(text)
    assert message in str(refused.value)
