"""The mixture with the least KL divergence within bounds, against a search of all mixtures."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamacpp_instr.cli.options import bytes_of_size
from llamacpp_instr.model.file import Weight
from llamacpp_instr.model.types import BY_NAME
from llamacpp_instr.recipe.choose import Bounds, choose, nearest
from llamacpp_instr.recipe.measure import MOST_GROUPS, Choice, group_tensors
from llamacpp_instr.recipe.report import dominated

TYPES = [BY_NAME[name] for name in ("Q2_K", "Q4_K", "Q6_K", "Q8_0")]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[Choice]], Bounds]:
    """A few tensors, each with some types, and bounds that may be impossible."""
    tensors = [
        [
            Choice(type_, *(draw(st.integers(low, 50)) for low in (1, 0, 0)))
            for type_ in TYPES[: draw(st.integers(1, 4))]
        ]
        for _ in range(draw(st.integers(1, 5)))
    ]  # fmt: skip
    bound = st.none() | st.integers(0, 150)
    return tensors, Bounds(draw(bound), draw(bound))


def search(tensors: Sequence[Sequence[Choice]], bounds: Bounds) -> float | None:
    """The least KL divergence of all mixtures within the bounds."""
    found = [
        sum(of.kl for of in mixture)
        for mixture in itertools.product(*tensors)
        if (bounds.n_bytes is None or sum(of.n_bytes for of in mixture) <= bounds.n_bytes)
        and (bounds.ns is None or sum(of.ns for of in mixture) <= bounds.ns)
    ]
    return min(found, default=None)


@given(problems())
def test_the_optimum_is_that_of_an_exhaustive_search(
    problem: tuple[list[list[Choice]], Bounds],
) -> None:
    tensors, bounds = problem
    best, chosen = search(tensors, bounds), choose(tensors, bounds)
    if best is None or chosen is None:
        assert best is None
        assert chosen is None
        assert nearest(tensors, bounds, 7)
        return
    taken = [tensors[i][choice] for i, choice in enumerate(chosen.choices)]
    assert bounds.n_bytes is None or sum(of.n_bytes for of in taken) <= bounds.n_bytes
    assert bounds.ns is None or sum(of.ns for of in taken) <= bounds.ns
    assert sum(of.kl for of in taken) == chosen.kl == pytest.approx(best)
    assert chosen.gap == 0


def test_what_is_impossible_names_the_nearest() -> None:
    tensors = [[Choice(TYPES[0], 40, 0.1, 30.0), Choice(TYPES[1], 60, 0.0, 20.0)]] * 2
    assert "the smallest file has 90 bytes, but only 70" in nearest(tensors, Bounds(60), 10)
    assert "for each token, but only 3e-05 ms" in nearest(tensors, Bounds(None, 30), 0)
    assert "none is both small and fast enough" in nearest(tensors, Bounds(80, 40), 0)


@pytest.mark.parametrize(
    ("size", "n_bytes"),
    [("4.5GB", 4_500_000_000), ("1MB", 10**6), ("1.5 mb", 1_500_000), ("0.001TB", 10**9)],
)
def test_a_size_may_have_decimals(size: str, n_bytes: int) -> None:
    option = click.Option(["--size"])
    assert bytes_of_size(click.Context(click.Command("recipe")), option, size) == n_bytes


def weights(n_layers: int) -> list[Weight]:
    roles = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    names = [f"blk.{layer}.{role}.weight" for layer in range(n_layers) for role in roles]
    names = ["token_embd.weight", *names, "output.weight"]
    return [Weight(name, BY_NAME["F16"], (256, 256), Path("m.gguf"), 0) for name in names]


@pytest.mark.parametrize("n_layers", [1, 2, 4, 5, 30, 80, 126])
def test_groups_are_neighbours_of_one_role(n_layers: int) -> None:
    tensors = weights(n_layers)
    groups = group_tensors(tensors)
    assert len(groups) <= MOST_GROUPS
    assert sorted(name for names in groups.values() for name in names) == sorted(
        weight.name for weight in tensors
    ), "each tensor is in one group"
    for key, names in groups.items():
        layers = [int(name.split(".")[1]) for name in names if name.startswith("blk.")]
        assert (
            layers == list(range(layers[0], layers[0] + len(layers))) if layers else len(names) == 1
        )
        if layers:
            assert key.split()[1] in (f"{layers[0]}", f"{layers[0]}-{layers[-1]}")
    sizes = [len(names) for names in groups.values() if len(names) > 1]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_a_model_with_more_roles_than_groups_has_a_group_for_each_role() -> None:
    many = [
        Weight(f"blk.{layer}.role{i}.weight", BY_NAME["F16"], (256, 256), Path("m.gguf"), 0)
        for layer in range(3)
        for i in range(MOST_GROUPS + 5)
    ]
    assert {len(names) for names in group_tensors(many).values()} == {3}


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=8))
def test_a_type_is_beaten_by_one_that_is_worse_in_nothing(rows: list[tuple[int, int, int]]) -> None:
    for row, by in zip(rows, dominated(rows), strict=True):
        worse_in_nothing = [
            other for other in rows if other != row and max(map(int.__sub__, other, row)) <= 0
        ]
        assert (by is None) == (not worse_in_nothing)
        assert by is None or rows[by] in worse_in_nothing
