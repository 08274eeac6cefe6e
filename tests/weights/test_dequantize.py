"""Numbers from stored bytes: ggml's, gguf-py's and those computed by hand are equal.

Blocks by hand are those of test_block_layout.py, which also compares both with its own decoder."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.lab.weights.measure import (
    Dequantizer,
    gguf_dequantizer,
    load_dequantizer,
)
from llamacpp_instr.model.types import BY_NAME, TYPES, GgmlType

GGML = load_dequantizer()
GGUF = gguf_dequantizer()
ONLY_GGML = {"Q1_0", "Q2_0"}
NOBODY = {"Q8_1", "Q8_K"}
BOTH = [t for t in TYPES.values() if t.name not in ONLY_GGML | NOBODY]


def same(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Equal to the bit, except for the bits of NaN."""
    nan = np.isnan(a)
    return bool(
        a.dtype == b.dtype == np.float32
        and np.array_equal(nan, np.isnan(b))
        and np.array_equal(a.view(np.uint32)[~nan], b.view(np.uint32)[~nan])
    )


@pytest.mark.native
def test_the_native_library_is_preferred() -> None:
    assert (GGML.name, GGUF.name) == ("ggml", "gguf-py")


@pytest.mark.native
def test_ggml_reads_every_type_that_files_contain() -> None:
    assert {t.name for t in TYPES.values() if not GGML.reads(t)} == NOBODY
    assert {t.name for t in TYPES.values() if not GGUF.reads(t)} == NOBODY | ONLY_GGML


@pytest.mark.native
@pytest.mark.parametrize("type_", BOTH, ids=str)
@settings(max_examples=25)
@given(data=st.data())
def test_both_agree_to_the_bit_on_any_bytes(type_: GgmlType, data: st.DataObject) -> None:
    n_blocks = data.draw(st.integers(1, 9))
    seed = data.draw(st.integers(0, 2**32 - 1))
    stored = np.random.default_rng(seed).integers(0, 256, n_blocks * type_.block_bytes, np.uint8)
    # whole blocks of a drawn byte have scales that are zero, infinite or NaN
    stored[: type_.block_bytes] = data.draw(st.integers(0, 255))
    n = n_blocks * type_.block
    assert same(GGML.to_float(type_, stored, n), GGUF.to_float(type_, stored, n))


@pytest.fixture(
    params=[
        pytest.param(GGML, marks=pytest.mark.native, id="ggml"),
        pytest.param(GGUF, id="gguf-py"),
    ]
)
def dequantizer(request: pytest.FixtureRequest) -> Any:
    return request.param


def numbers(dequantizer: Dequantizer, name: str, stored: bytes) -> list[float]:
    type_ = BY_NAME[name]
    n = len(stored) // type_.block_bytes * type_.block
    found: list[float] = dequantizer.to_float(type_, stored, n).tolist()
    return found


@pytest.mark.parametrize(
    ("name", "dtype"), [("F32", "<f4"), ("F64", "<f8"), ("I8", "i1"), ("I16", "<i2"),
                        ("I32", "<i4"), ("I64", "<i8"), ("F16", "<f2")],
)  # fmt: skip
def test_plain_numbers(dequantizer: Dequantizer, name: str, dtype: str) -> None:
    values = np.array([0, 1, -2, 100], dtype)
    assert numbers(dequantizer, name, values.tobytes()) == [0, 1, -2, 100]


def test_bf16_by_hand(dequantizer: Dequantizer) -> None:
    # the upper half of a float: sign, eight bits of exponent, seven of mantissa
    assert numbers(dequantizer, "BF16", struct.pack("<3H", 0x3F80, 0xC000, 0x3FC0)) == [1, -2, 1.5]


def test_room_is_filled_from_its_beginning(dequantizer: Dequantizer) -> None:
    values = list(range(-64, 96))
    stored = b"".join(struct.pack("<e32b", 1, *values[at : at + 32]) for at in range(0, 160, 32))
    for name, data in (("Q8_0", stored), ("F32", np.array(values, "<f4").tobytes())):
        room = np.full(192, 7, np.float32)
        dequantizer.fill(BY_NAME[name], data, 160, room)
        assert room.tolist() == [*values, *[7] * 32]
    assert dequantizer.to_float(BY_NAME["Q8_0"], b"", 0).tolist() == []


def test_bytes_may_lie_anywhere(dequantizer: Dequantizer) -> None:
    stored = struct.pack("<e32b", 1, *range(32))
    shifted = np.frombuffer(b"?" + stored, np.uint8)[1:]
    assert dequantizer.to_float(BY_NAME["Q8_0"], shifted, 32).tolist() == list(range(32))


@pytest.mark.parametrize(
    ("name", "size", "n", "word"),
    [
        ("Q8_0", 34, 31, "not a whole number of blocks"),
        ("Q8_0", 33, 32, "have 34 bytes, not 33"),
        ("Q8_0", 68, 32, "have 34 bytes, not 68"),
        ("F16", 3, 2, "have 4 bytes, not 3"),
        ("Q4_K", 144, -256, "not a whole number of blocks"),
        ("Q8_K", 292, 256, "no conversion of Q8_K"),
        ("Q8_1", 36, 32, "no conversion of Q8_1"),
    ],
)
def test_wrong_sizes_are_refused(
    dequantizer: Dequantizer, name: str, size: int, n: int, word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        dequantizer.to_float(BY_NAME[name], bytes(size), n)


@pytest.mark.parametrize(
    "room",
    [
        np.empty(31, np.float32),
        np.empty(0, np.float32),
        np.empty(32, np.float64),
        np.empty(64, np.float32)[::2],
        np.frombuffer(bytes(128), np.float32),
    ],
    ids=["a part of a block", "none", "of 64 bits", "with gaps", "read-only"],
)
def test_room_that_cannot_be_used_is_refused(dequantizer: Dequantizer, room: Any) -> None:
    with pytest.raises(UsageError, match="room for"):
        dequantizer.fill(BY_NAME["Q8_0"], bytes(34), 32, room)
