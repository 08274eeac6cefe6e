"""The layout of the blocks of quantized tensors: their fields, split into scales and quants.

Invariant: `Blocks.values()` is equal to the bit to ggml's `to_float` of the same bytes: the numbers
are float32, multiplied and added in ggml's order. The layouts are the structs `block_*` of
ggml/src/ggml-common.h in the pinned upstream, which the functions below name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.model.types import BY_NAME, GgmlType

Bytes: TypeAlias = "NDArray[np.uint8]"
Codes: TypeAlias = "NDArray[np.uint8] | NDArray[np.int8]"
Floats: TypeAlias = "NDArray[np.float32]"


@dataclass(frozen=True)
class Field:
    """Consecutive bytes of a block, under ggml's name for them."""

    name: str
    n_bytes: int
    holds: str


@dataclass(frozen=True)
class CodeRange:
    """The integers that a field can store, and the number that each one encodes."""

    low: int
    high: int
    levels: tuple[float, ...]
    """from `low` to `high`"""
    ends: tuple[float, float]
    """the smallest and the largest level that ggml's quantizer uses"""

    @cached_property
    def table(self) -> Floats:
        """The level of each code; a negative code counts from the end, as in an int8's byte."""
        table = np.zeros(256, np.float32)
        for code, level in zip(range(self.low, self.high + 1), self.levels, strict=True):
            table[code & 0xFF] = level
        return table

    def levels_of(self, codes: Codes) -> Floats:
        """The number that each code encodes."""
        return self.table[codes.view(np.uint8)]


@dataclass(frozen=True, eq=False)
class Parts:
    """Decoded blocks; integers as they are stored. The first dimension is the block."""

    quants: Codes
    """(n_blocks, block)"""
    d: Floats | None = None
    """(n_blocks,) the block's scale; None if only sub-blocks have one"""
    dmin: Floats | None = None
    """(n_blocks,) `m`, which is added to each element; with `mins`, the scale of the minima"""
    scales: Codes | None = None
    """(n_blocks, n_sub); None if a block has no sub-blocks"""
    mins: Codes | None = None
    """(n_blocks, n_sub); subtracted after multiplication by `dmin`"""


@dataclass(frozen=True)
class Layout:
    """The layout of a type's blocks."""

    fields: tuple[Field, ...]
    """in the order of the struct"""
    quants: CodeRange
    take_apart: Callable[[Mapping[str, Bytes]], Parts]
    """decodes each field's bytes (n_blocks, n_bytes)"""
    sub_block: int = 0
    """elements that share a scale; 0 if the whole block does"""
    scales: CodeRange | None = None
    mins: CodeRange | None = None
    least_normal: float = 2.0**-14
    """smallest normal number in the format of `d`; smaller ones except 0 are denormal"""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of one type, decoded."""

    type: GgmlType
    layout: Layout
    parts: Parts

    @property
    def n_sub(self) -> int:
        """Sub-blocks of a block (elements that share a scale); 1 for a type without sub-blocks."""
        return self.type.block // (self.layout.sub_block or self.type.block)

    def steps(self) -> Floats:
        """(n_blocks, n_sub): `d` times scale, by which the levels of the quants are multiplied."""
        d, scales = self.parts.d, self.parts.scales
        if scales is None or self.layout.scales is None:
            assert d is not None
            return d[:, None]
        levels = self.layout.scales.levels_of(scales)
        with _quiet():
            return levels if d is None else d[:, None] * levels

    def offsets(self) -> Floats | None:
        """(n_blocks, n_sub): added to each element; None for types without minima."""
        dmin, mins = self.parts.dmin, self.parts.mins
        if dmin is None:
            return None
        if mins is None or self.layout.mins is None:
            return dmin[:, None]
        with _quiet():
            return -(dmin[:, None] * self.layout.mins.levels_of(mins))

    def values(self) -> Floats:
        """(n_blocks, block): the elements as float32, equal to ggml's to the bit."""
        levels = self.layout.quants.levels_of(self.parts.quants)
        steps, offsets = self.steps()[:, :, None], self.offsets()
        with _quiet():
            by_sub = steps * levels.reshape(len(levels), self.n_sub, -1)
            if offsets is not None:
                by_sub += offsets[:, :, None]
        return by_sub.reshape(levels.shape)


def decode_blocks(type_: GgmlType, data: Bytes) -> Blocks:
    """Decodes blocks of a type in `LAYOUTS`; `data` has the shape (n_blocks, block_bytes)."""
    layout = LAYOUTS[type_.name]
    ends = np.cumsum([field.n_bytes for field in layout.fields])
    split = np.split(data, ends[:-1], axis=1)
    parts = {field.name: part for field, part in zip(layout.fields, split, strict=True)}
    return Blocks(type_, layout, layout.take_apart(parts))


def can_decode(type_: GgmlType) -> bool:
    """Whether blocks of this type can be decoded."""
    return type_.name in LAYOUTS


def _quiet() -> np.errstate:
    """Keep NaN scales, without a warning."""
    return np.errstate(invalid="ignore", over="ignore")


def _unpack(packed: Bytes, bits: int, width: int) -> Bytes:
    """Codes of `bits` bits: first the lowest bits of `width` consecutive bytes, then the next."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    grouped = packed.reshape(len(packed), -1, 1, width)
    codes: Bytes = (grouped >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def _half(field: Bytes) -> Floats:
    """A field of one float16 as float32."""
    numbers: NDArray[np.float16] = np.ascontiguousarray(field).view("<f2")
    return numbers[:, 0].astype(np.float32)


def _q1_0(at: Mapping[str, Bytes]) -> Parts:
    """block_q1_0: each bit is a sign."""
    return Parts(_unpack(at["qs"], 1, 1), _half(at["d"]))


def _q2_0(at: Mapping[str, Bytes]) -> Parts:
    """block_q2_0: four consecutive elements in a byte."""
    return Parts(_unpack(at["qs"], 2, 1), _half(at["d"]))


def _q4_0(at: Mapping[str, Bytes]) -> Parts:
    """block_q4_0, block_iq4_nl: low nibbles are the first half of the block."""
    return Parts(_unpack(at["qs"], 4, 16), _half(at["d"]))


def _q4_1(at: Mapping[str, Bytes]) -> Parts:
    """block_q4_1: like block_q4_0, with a minimum."""
    return Parts(_unpack(at["qs"], 4, 16), _half(at["d"]), _half(at["m"]))


def _q5_0(at: Mapping[str, Bytes]) -> Parts:
    """block_q5_0: like block_q4_0, with the fifth bits in a field of their own."""
    return Parts(_unpack(at["qs"], 4, 16) | _unpack(at["qh"], 1, 1) << 4, _half(at["d"]))


def _q5_1(at: Mapping[str, Bytes]) -> Parts:
    """block_q5_1: like block_q5_0, with a minimum."""
    quants = _unpack(at["qs"], 4, 16) | _unpack(at["qh"], 1, 1) << 4
    return Parts(quants, _half(at["d"]), _half(at["m"]))


def _q8_0(at: Mapping[str, Bytes]) -> Parts:
    """block_q8_0: a signed byte per element."""
    return Parts(at["qs"].view(np.int8), _half(at["d"]))


def _q2_k(at: Mapping[str, Bytes]) -> Parts:
    """block_q2_K: a 4-bit scale and a 4-bit minimum for every 16 elements."""
    scales = at["scales"]
    return Parts(
        _unpack(at["qs"], 2, 32), _half(at["d"]), _half(at["dmin"]), scales & 0xF, scales >> 4
    )


def _q3_k(at: Mapping[str, Bytes]) -> Parts:
    """block_q3_K: the third bits in `hmask`; 6-bit scales, stored as 4 lower and 2 upper bits."""
    packed = at["scales"]
    scales = _unpack(packed[:, :8], 4, 8) | _unpack(packed[:, 8:], 2, 4) << 4
    quants = _unpack(at["qs"], 2, 32) | _unpack(at["hmask"], 1, 32) << 2
    return Parts(quants, _half(at["d"]), scales=scales)


def _q4_k(at: Mapping[str, Bytes]) -> Parts:
    """block_q4_K: a 6-bit scale and a 6-bit minimum for every 32 elements."""
    scales, mins = _scales_and_mins(at["scales"])
    return Parts(_unpack(at["qs"], 4, 32), _half(at["d"]), _half(at["dmin"]), scales, mins)


def _q5_k(at: Mapping[str, Bytes]) -> Parts:
    """block_q5_K: like block_q4_K, with the fifth bits in a field of their own."""
    scales, mins = _scales_and_mins(at["scales"])
    quants = _unpack(at["qs"], 4, 32) | _unpack(at["qh"], 1, 32) << 4
    return Parts(quants, _half(at["d"]), _half(at["dmin"]), scales, mins)


def _scales_and_mins(packed: Bytes) -> tuple[Bytes, Bytes]:
    """8 6-bit scales and 8 6-bit minima from 12 bytes, like `get_scale_min_k4` (ggml-quants.c)."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (last & 0xF) | (first >> 6) << 4], axis=1)
    mins = np.concatenate([second & 63, (last >> 4) | (second >> 6) << 4], axis=1)
    return scales, mins


def _q6_k(at: Mapping[str, Bytes]) -> Parts:
    """block_q6_K: the upper two bits apart; a signed byte as the scale of every 16 elements."""
    quants = _unpack(at["ql"], 4, 64) | _unpack(at["qh"], 2, 32) << 4
    return Parts(quants, _half(at["d"]), scales=at["scales"].view(np.int8))


def _iq4_xs(at: Mapping[str, Bytes]) -> Parts:
    """block_iq4_xs: 6-bit scales for every 32 elements, stored as 4 lower and 2 upper bits."""
    scales = _unpack(at["scales_l"], 4, 1) | _unpack(at["scales_h"], 2, 1) << 4
    return Parts(_unpack(at["qs"], 4, 16), _half(at["d"]), scales=scales)


def _tq1_0(at: Mapping[str, Bytes]) -> Parts:
    """block_tq1_0: five ternary digits in a byte, as a fraction of 256; four in those of `qh`."""
    groups = [(at["qs"][:, :32], 5), (at["qs"][:, 32:], 5), (at["qh"], 4)]
    digits = []
    for packed, n_digits in groups:
        for i in range(n_digits):
            rest = packed * np.uint8(3**i)  # modulo 256, as in C
            digits.append((rest.astype(np.uint16) * 3 >> 8).astype(np.uint8))
    return Parts(np.concatenate(digits, axis=1), _half(at["d"]))


def _tq2_0(at: Mapping[str, Bytes]) -> Parts:
    """block_tq2_0: ternary digits of two bits."""
    return Parts(_unpack(at["qs"], 2, 32), _half(at["d"]))


def _mxfp4(at: Mapping[str, Bytes]) -> Parts:
    """block_mxfp4: the scale is a power of two, halved because the levels are doubled."""
    e = at["e"][:, 0].astype(np.uint32)
    # the two smallest are denormal: `ggml_e8m0_to_fp32_half` (ggml-impl.h)
    bits = np.where(e < 2, np.uint32(0x00200000) << e, (e - 1) << np.uint32(23))
    return Parts(_unpack(at["qs"], 4, 16), bits.astype(np.uint32).view(np.float32))


def _nvfp4(at: Mapping[str, Bytes]) -> Parts:
    """block_nvfp4: an 8-bit float as the scale of every 16 elements; no scale for the block."""
    return Parts(_unpack(at["qs"], 4, 8), scales=at["d"])


def _integers(low: int, high: int, zero: int = 0) -> CodeRange:
    """Codes whose level is the code minus `zero`."""
    levels = tuple(float(code - zero) for code in range(low, high + 1))
    return CodeRange(low, high, levels, (levels[0], levels[-1]))


def _ue4m3(code: int) -> float:
    """Half of an unsigned 8-bit float (E4M3), like `ggml_ue4m3_to_fp32` (ggml-impl.h)."""
    if code in (0, 0x7F):
        return 0.0
    exponent, mantissa = code >> 3 & 0xF, code & 7
    return (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)) / 2


# `kvalues_iq4nl` and the E2M1 numbers, doubled (ggml-common.h)
_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_IQ4 = CodeRange(0, 15, _IQ4_LEVELS, (-127, 113))
_FP4 = CodeRange(0, 15, _FP4_LEVELS, (-12, 12))
_SIGNED_BYTES = CodeRange(-128, 127, tuple(range(-128, 128)), (-127, 127))
_SIX_BITS = _integers(0, 63)

_D = Field("d", 2, "float16 scale")
_M = Field("m", 2, "float16 minimum")
_DMIN = Field("dmin", 2, "float16, for minima")


def _qs(n_bytes: int, holds: str = "quants") -> Field:
    return Field("qs", n_bytes, holds)


LAYOUTS: dict[str, Layout] = {
    "Q4_0": Layout((_D, _qs(16)), _integers(0, 15, 8), _q4_0),
    "Q4_1": Layout((_D, _M, _qs(16)), _integers(0, 15), _q4_1),
    "Q5_0": Layout(
        (_D, Field("qh", 4, "quants: fifth bit"), _qs(16, "quants: lower 4 bits")),
        _integers(0, 31, 16),
        _q5_0,
    ),
    "Q5_1": Layout(
        (_D, _M, Field("qh", 4, "quants: fifth bit"), _qs(16, "quants: lower 4 bits")),
        _integers(0, 31),
        _q5_1,
    ),
    "Q8_0": Layout((_D, _qs(32)), _SIGNED_BYTES, _q8_0),
    "Q2_K": Layout(
        (Field("scales", 16, "4-bit scales, minima"), _qs(64), _D, _DMIN),
        _integers(0, 3), _q2_k, 16, _integers(0, 15), _integers(0, 15),
    ),
    "Q3_K": Layout(
        (Field("hmask", 32, "quants: third bit"), _qs(64, "quants: lower 2 bits"),
         Field("scales", 12, "6-bit scales"), _D),
        _integers(0, 7, 4), _q3_k, 16, _integers(0, 63, 32),
    ),
    "Q4_K": Layout(
        (_D, _DMIN, Field("scales", 12, "6-bit scales, minima"), _qs(128)),
        _integers(0, 15), _q4_k, 32, _SIX_BITS, _SIX_BITS,
    ),
    "Q5_K": Layout(
        (_D, _DMIN, Field("scales", 12, "6-bit scales, minima"),
         Field("qh", 32, "quants: fifth bit"), _qs(128, "quants: lower 4 bits")),
        _integers(0, 31), _q5_k, 32, _SIX_BITS, _SIX_BITS,
    ),
    "Q6_K": Layout(
        (Field("ql", 128, "quants: lower 4 bits"), Field("qh", 64, "quants: upper 2 bits"),
         Field("scales", 16, "8-bit scales"), _D),
        _integers(0, 63, 32), _q6_k, 16, _integers(-128, 127),
    ),
    "IQ4_NL": Layout((_D, _qs(16, "indices of 16 levels")), _IQ4, _q4_0),
    "IQ4_XS": Layout(
        (_D, Field("scales_h", 2, "scales: upper 2 bits"),
         Field("scales_l", 4, "scales: lower 4 bits"), _qs(128, "indices of 16 levels")),
        _IQ4, _iq4_xs, 32, _integers(0, 63, 32),
    ),
    "TQ1_0": Layout(
        (_qs(48, "quants: 5 in a byte"), Field("qh", 4, "quants: 4 in a byte"), _D),
        _integers(0, 2, 1), _tq1_0,
    ),
    # ggml reads the fourth code as 2; its quantizer never writes it
    "TQ2_0": Layout((_qs(64), _D), CodeRange(0, 3, (-1, 0, 1, 2), (-1, 1)), _tq2_0),
    "MXFP4": Layout(
        (Field("e", 1, "scale: power of two"), _qs(16, "4-bit float quants")),
        _FP4, _mxfp4, least_normal=2.0**-126,
    ),
    "NVFP4": Layout(
        (Field("d", 4, "8-bit float scales"), _qs(32, "4-bit float quants")),
        _FP4, _nvfp4, 16, CodeRange(0, 255, tuple(map(_ue4m3, range(256))), (0, 224)),
    ),
    "Q1_0": Layout((_D, _qs(16, "signs")), CodeRange(0, 1, (-1, 1), (-1, 1)), _q1_0),
    "Q2_0": Layout((_D, _qs(16)), _integers(0, 3, 1), _q2_0),
}  # fmt: skip
"""by type name"""

assert all(sum(f.n_bytes for f in LAYOUTS[t].fields) == BY_NAME[t].block_bytes for t in LAYOUTS)
