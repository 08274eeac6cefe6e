"""The steps to a view select what numpy selects with its strides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from llamacpp_instr.converters.exports.tensors import Slices, find_slices, places


def take(base: np.ndarray, steps: Slices) -> np.ndarray:
    parts = tuple(slice(a, b) for a, b in zip(steps.starts, steps.ends, strict=True))
    return base.reshape(steps.reshape)[parts].transpose(steps.transpose).reshape(steps.shape)


@given(st.data())
def test_any_view_inside_its_base(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    strides = data.draw(st.lists(st.integers(0, 30), min_size=len(shape), max_size=len(shape)))
    offset = data.draw(st.integers(0, 20))
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    base = np.arange(last + 1 + data.draw(st.integers(0, 10)))
    wanted = as_strided(base[offset:], shape, [8 * step for step in strides])
    assert np.array_equal(base[places(offset, shape, strides)], wanted)
    steps = find_slices(len(base), offset, shape, strides)
    assert steps is None or np.array_equal(take(base, steps), wanted)


@given(st.lists(st.integers(1, 5), min_size=4, max_size=4), st.permutations(range(4)), st.data())
def test_slices_suffice_for_permuted_parts_of_a_tensor(
    sizes: list[int], order: list[int], data: st.DataObject
) -> None:
    base = np.arange(np.prod(sizes)).reshape(sizes)
    parts = []
    for n in sizes:
        start = data.draw(st.integers(0, n - 1))
        parts.append(slice(start, data.draw(st.integers(start + 1, n))))
    view = base[tuple(parts)].transpose(order)
    offset = int(view.ravel()[0])
    strides = [step // 8 for step in view.strides]
    steps = find_slices(base.size, offset, view.shape, strides)
    assert steps is not None
    assert np.array_equal(take(base.ravel(), steps), view)


@pytest.mark.parametrize(
    ("n_base", "offset", "shape", "strides", "found"),
    [
        (24, 0, (4, 6), (6, 1), Slices((4, 6, 1), (0, 0, 0), (4, 6, 1), (0, 1, 2), (4, 6))),
        (24, 0, (6, 4), (1, 6), Slices((4, 6, 1), (0, 0, 0), (4, 6, 1), (1, 0, 2), (6, 4))),
        (24, 8, (2, 3), (6, 1), Slices((4, 6, 1), (1, 2, 0), (3, 5, 1), (0, 1, 2), (2, 3))),
        (24, 1, (4, 3), (6, 2), Slices((4, 3, 2), (0, 0, 1), (4, 3, 2), (0, 1, 2), (4, 3))),
        (24, 5, (1, 1), (6, 1), Slices((24,), (5,), (6,), (0,), (1, 1))),
        (24, 0, (4, 7), (6, 1), None),
        (24, 19, (1, 6), (6, 1), None),
        (24, 0, (4, 6), (0, 1), None),
        (24, 0, (0, 6), (6, 1), None),
        (24, 0, (3, 3), (7, 1), None),
    ],
)
def test_a_view_is_a_part_of_a_reshaped_base(
    n_base: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...],
    found: Slices | None,
) -> None:  # fmt: skip
    made = find_slices(n_base, offset, shape, strides)
    if found is None or made is None or shape != (1, 1):
        assert made == found
    else:
        assert take(np.arange(n_base), made).ravel().tolist() == [offset]


def test_slices_say_whether_they_are_the_whole_base_and_in_its_order() -> None:
    of = [((4, 6), (6, 1), 0), ((6, 4), (1, 6), 0), ((3, 6), (6, 1), 0), ((3, 6), (6, 1), 6)]
    made = [find_slices(24, offset, shape, strides) for shape, strides, offset in of]
    assert [(not x.cut, x.is_base) for x in made if x] == [
        (True, True), (True, False), (False, False), (False, False),
    ]  # fmt: skip
