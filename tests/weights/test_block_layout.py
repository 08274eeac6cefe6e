"""Blocks decode to the same bits as in ggml and gguf-py, and to numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.lab.weights.blocks import LAYOUTS, Bytes, decode_blocks
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import BY_NAME, GgmlType
from tests.kit.block_models import half
from tests.kit.quantized_kit import quantized_demo
from tests.weights.test_dequantize import GGML, GGUF, ONLY_GGML, same

TYPE_NAMES = list(LAYOUTS)


def assert_as_ggml(type_: GgmlType, data: Bytes) -> None:
    ours = decode_blocks(type_, data).values()
    assert ours.shape == (len(data), type_.block)
    for truth in (GGML, GGUF):
        if truth is GGML or type_.name not in ONLY_GGML:
            assert same(ours.ravel(), truth.to_float(type_, data, ours.size)), truth.name


@pytest.mark.native
@pytest.mark.parametrize("name", TYPE_NAMES)
def test_random_bytes_are_the_numbers_of_ggml_and_gguf_py(name: str) -> None:
    type_ = BY_NAME[name]
    data = np.random.default_rng(7).integers(0, 256, (4000, type_.block_bytes), np.uint8)
    assert_as_ggml(type_, data)


@pytest.mark.parametrize("name", [name for name in TYPE_NAMES if name not in ONLY_GGML])
def test_random_bytes_are_the_numbers_of_gguf_py(name: str) -> None:
    type_ = BY_NAME[name]
    data = np.random.default_rng(7).integers(0, 256, (1000, type_.block_bytes), np.uint8)
    ours = decode_blocks(type_, data).values()
    assert same(ours.ravel(), GGUF.to_float(type_, data, ours.size))


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_random_bytes_have_every_code_of_a_range_and_no_other(name: str) -> None:
    """Only TQ1_0 spreads its bytes unevenly, over codes 0 to 2."""
    type_ = BY_NAME[name]
    data = np.random.default_rng(7).integers(0, 256, (1000, type_.block_bytes), np.uint8)
    blocks = decode_blocks(type_, data)
    layout, parts = blocks.layout, blocks.parts
    assert (parts.scales is None, parts.mins is None) == (
        layout.scales is None,
        layout.mins is None,
    )
    for codes, of in (
        (parts.quants, layout.quants), (parts.scales, layout.scales), (parts.mins, layout.mins)
    ):  # fmt: skip
        if codes is not None and of is not None:
            seen = np.unique(codes).tolist()
            assert seen == list(range(of.low, of.high + 1))
            assert len(of.levels) == len(seen)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("Q4_0", (-8, 7)), ("Q4_1", (0, 15)), ("Q5_0", (-16, 15)), ("Q5_1", (0, 31)),
        ("Q8_0", (-127, 127)), ("Q2_K", (0, 3)), ("Q3_K", (-4, 3)), ("Q4_K", (0, 15)),
        ("Q5_K", (0, 31)), ("Q6_K", (-32, 31)), ("IQ4_NL", (-127, 113)), ("IQ4_XS", (-127, 113)),
        ("TQ1_0", (-1, 1)), ("TQ2_0", (-1, 1)), ("MXFP4", (-12, 12)), ("NVFP4", (-12, 12)),
        ("Q1_0", (-1, 1)), ("Q2_0", (-1, 2)),
    ],
)  # fmt: skip
def test_the_smallest_and_the_largest_level_of_a_quantizer(
    name: str, ends: tuple[int, int]
) -> None:
    assert LAYOUTS[name].quants.ends == ends


@pytest.mark.parametrize(
    ("name", "scales", "mins"),
    [("Q2_K", (0, 15), (0, 15)), ("Q3_K", (-32, 31), None), ("Q4_K", (0, 63), (0, 63)),
     ("Q6_K", (-128, 127), None), ("IQ4_XS", (-32, 31), None), ("NVFP4", (0, 224), None)],
)  # fmt: skip
def test_the_smallest_and_the_largest_scale(
    name: str, scales: tuple[int, int], mins: tuple[int, int] | None
) -> None:
    layout = LAYOUTS[name]
    assert layout.scales is not None
    assert layout.scales.ends == scales
    assert (layout.mins.ends if layout.mins else None) == mins


def test_the_smallest_normal_scale() -> None:
    """Of float16, and of float32 for the powers of two of MXFP4."""
    normal = {name: layout.least_normal for name, layout in LAYOUTS.items()}
    small = {name: np.finfo(np.float16).smallest_normal for name in LAYOUTS}
    assert normal == small | {"MXFP4": np.finfo(np.float32).smallest_normal}


def test_a_block_of_q1_0_and_one_of_q2_0_by_hand() -> None:
    """A bit is a sign, the lowest first; two bits are -1 to 2."""
    (signs,) = decode_blocks(
        BY_NAME["Q1_0"], block("Q1_0", half(0.5), bytes([0b1101] + [0] * 15))
    ).values()
    assert signs[:5].tolist() == [0.5, -0.5, 0.5, 0.5, -0.5]
    assert set(signs[4:].tolist()) == {-0.5}
    (codes,) = decode_blocks(
        BY_NAME["Q2_0"], block("Q2_0", half(0.5), bytes([0b11100100] + [0] * 15))
    ).values()
    assert codes[:4].tolist() == [-0.5, 0, 0.5, 1]
    assert set(codes[4:].tolist()) == {-0.5}


@pytest.mark.native
@settings(max_examples=150)
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
        if weight.type.name not in LAYOUTS or weight.type in seen:
            continue
        seen.add(weight.type)
        data = np.fromfile(weight.path, np.uint8, weight.n_bytes, offset=weight.offset)
        assert_as_ggml(weight.type, data.reshape(-1, weight.type.block_bytes))
    assert any(file_type.startswith(type_.name) for type_ in seen)


def block(type_name: str, *fields: bytes) -> Bytes:
    data = np.frombuffer(b"".join(fields), np.uint8)[None, :]
    assert data.shape[1] == BY_NAME[type_name].block_bytes
    return data


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
    assert "Q4_K" in LAYOUTS
    assert not {"F32", "BF16", "IQ2_XXS", "IQ1_M"} & LAYOUTS.keys()
