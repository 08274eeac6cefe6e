"""Blocks are decoded as by ggml and gguf-py, to the bit, and as computed by hand."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.llama.native import load
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import BY_NAME, GgmlType
from llamacpp_instr.weights.layout import LAYOUTS, Bytes, Floats, can_decode, decode_blocks
from tests.kit.quantized_kit import quantized_demo

TYPE_NAMES = list(LAYOUTS)
TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class Traits(ctypes.Structure):
    """struct ggml_type_traits (ggml/include/ggml.h)."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", TO_FLOAT),
        ("from_float_ref", ctypes.c_void_p),
    ]


def ggml_values(type_: GgmlType, data: Bytes) -> Floats:
    lib = load().lib
    lib.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    traits = lib.ggml_get_type_traits(type_.number).contents
    assert traits.type_name.decode().upper() == type_.name
    assert (traits.blck_size, traits.type_size) == (type_.block, type_.block_bytes)
    data = np.ascontiguousarray(data)
    out = np.empty((len(data), type_.block), np.float32)
    traits.to_float(data.ctypes.data, out.ctypes.data, out.size)
    return out


def assert_same_bits(ours: Floats, theirs: Floats) -> None:
    """NaN may have any bits; all other numbers are equal, zeros with their sign."""
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    none = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), none)
    np.testing.assert_array_equal(ours.view(np.uint32)[~none], theirs.view(np.uint32)[~none])


def assert_as_ggml(type_: GgmlType, data: Bytes) -> None:
    ours = decode_blocks(type_, data).values()
    assert_same_bits(ours, ggml_values(type_, data))
    if type_.name not in ("Q1_0", "Q2_0"):  # gguf-py does not know these yet
        with np.errstate(all="ignore"):
            theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(type_.number))
        assert_same_bits(ours, theirs)


@pytest.mark.native
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_random_bytes_are_the_numbers_of_ggml_and_gguf_py(name: str) -> None:
    type_ = BY_NAME[name]
    data = np.random.default_rng(7).integers(0, 256, (4000, type_.block_bytes), np.uint8)
    assert_as_ggml(type_, data)


@pytest.mark.native
@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(TYPE_NAMES), data=st.data())
def test_any_bytes_are_the_numbers_of_ggml(name: str, data: st.DataObject) -> None:
    type_ = BY_NAME[name]
    raw = data.draw(st.binary(min_size=type_.block_bytes, max_size=type_.block_bytes))
    assert_as_ggml(type_, np.frombuffer(raw, np.uint8)[None, :])


@pytest.mark.native
@pytest.mark.parametrize(
    "file_type",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K",
     "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0"],
)  # fmt: skip
def test_what_llama_quantize_wrote_is_the_numbers_of_ggml(file_type: str) -> None:
    seen = set()
    for weight in load_model_file(quantized_demo(file_type)).weights:
        if not can_decode(weight.type) or weight.type in seen:
            continue
        seen.add(weight.type)
        data = np.fromfile(weight.path, np.uint8, weight.n_bytes, offset=weight.offset)
        assert_as_ggml(weight.type, data.reshape(-1, weight.type.block_bytes))
    assert any(file_type.startswith(type_.name) for type_ in seen)


def block(type_name: str, *fields: bytes) -> Bytes:
    data = np.frombuffer(b"".join(fields), np.uint8)[None, :]
    assert data.shape[1] == BY_NAME[type_name].block_bytes
    return data


def half(*numbers: float) -> bytes:
    return np.array(numbers, "<f2").tobytes()


def test_a_block_of_q4_0_by_hand() -> None:
    # the first byte contains elements 0 (low nibble) and 16 (high nibble)
    data = block("Q4_0", half(0.5), bytes([0xF0]), bytes([0x88] * 15))
    blocks = decode_blocks(BY_NAME["Q4_0"], data)
    assert blocks.parts.d is not None
    assert (blocks.parts.d.tolist(), blocks.parts.dmin, blocks.parts.scales) == ([0.5], None, None)
    assert blocks.parts.quants[0].tolist() == [0] + [8] * 15 + [15] + [8] * 15
    assert blocks.values()[0].tolist() == [-4.0] + [0.0] * 15 + [3.5] + [0.0] * 15
    assert blocks.n_sub == 1


def test_a_block_of_q8_0_by_hand() -> None:
    codes = bytes([0, 1, 127, 0x81, 0x80]) + bytes(27)
    blocks = decode_blocks(BY_NAME["Q8_0"], block("Q8_0", half(2), codes))
    assert blocks.parts.quants[0, :5].tolist() == [0, 1, 127, -127, -128]
    assert blocks.values()[0, :5].tolist() == [0.0, 2.0, 254.0, -254.0, -256.0]


def test_a_block_of_q4_k_by_hand() -> None:
    # scales 1, 2, 3, 63 and minima 4, 5, 6, 7 have six bits of a byte; the low nibbles of the other
    # four are the last bytes', and their upper two bits those of the first eight bytes
    first = bytes([1 | 3 << 6, 2, 3, 63])
    second = bytes([4, 5, 6, 7 | 2 << 6])
    last = bytes([0x1F, 0x00, 0x30, 0x04])
    data = block("Q4_K", half(0.5, 0.25), first, second, last, bytes([0xF1] * 128))
    blocks = decode_blocks(BY_NAME["Q4_K"], data)
    assert blocks.parts.scales is not None
    assert blocks.parts.mins is not None
    assert blocks.parts.scales[0].tolist() == [1, 2, 3, 63, 15 | 3 << 4, 0, 0, 4]
    assert blocks.parts.mins[0].tolist() == [4, 5, 6, 7, 1, 0, 3, 0 | 2 << 4]
    assert blocks.parts.quants[0].tolist() == ([1] * 32 + [15] * 32) * 4
    assert blocks.steps()[0].tolist() == [0.5, 1.0, 1.5, 31.5, 31.5, 0.0, 0.0, 2.0]
    values = blocks.values()[0]
    assert values[::32].tolist() == [
        0.5 * 1 - 1, 1.0 * 15 - 1.25, 1.5 * 1 - 1.5, 31.5 * 15 - 1.75,
        31.5 * 1 - 0.25, 0, 0 - 0.75, 2.0 * 15 - 8,
    ]  # fmt: skip


def test_a_block_of_q3_k_by_hand() -> None:
    # bit 0 of hmask is the third bit of the first 32 elements; without it a level is 4 less
    hmask = bytes([1]) + bytes(31)
    scales = bytes([0x21] * 8) + bytes([0b11_10_01_00] * 4)
    blocks = decode_blocks(
        BY_NAME["Q3_K"], block("Q3_K", hmask, bytes([0b11]) + bytes(63), scales, half(1))
    )
    assert blocks.parts.scales is not None
    assert blocks.parts.scales[0].tolist() == [1] * 4 + [17] * 4 + [34] * 4 + [50] * 4
    assert blocks.parts.quants[0, :3].tolist() == [7, 0, 0]
    assert blocks.values()[0, :2].tolist() == [(1 - 32) * 3, (1 - 32) * -4]
    assert blocks.n_sub == 16


def test_types_that_cannot_be_taken_apart_are_known() -> None:
    assert can_decode(BY_NAME["Q4_K"])
    assert not any(can_decode(BY_NAME[name]) for name in ("F32", "BF16", "IQ2_XXS", "IQ1_M"))
