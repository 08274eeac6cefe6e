"""The blocks of quantized tensors: their layout, and blocks that are read from a model file.

A block is split into codes (quants, scales, minima) and float scales. The layouts are the structs
`block_*` of ggml/src/ggml-common.h in the pinned upstream.

Invariants: `Blocks.values()` is bit-identical to ggml's `to_float` of the same bytes: numbers
are float32, multiplied and added in ggml's order. Only the needed bytes are read, so memory follows
the chunk, not the file.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.model.file import ModelFile, Weight
from llamacpp_instr.model.types import BY_NAME, GgmlType

Bytes: TypeAlias = "NDArray[np.uint8]"
Codes: TypeAlias = "NDArray[np.uint8] | NDArray[np.int8]"
Floats: TypeAlias = "NDArray[np.float32]"
Fields: TypeAlias = Mapping[str, Bytes]
"""by name of a field: (n_blocks, n_bytes)"""

CHUNK = 1 << 19
"""elements decoded at a time: whole blocks of every type"""

_PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
"""types of a reference that store plain numbers, with numpy's codes"""


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
        table[np.arange(self.low, self.high + 1) & 0xFF] = self.levels
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


Unpack: TypeAlias = "Callable[[Fields], Codes] | tuple[tuple[str, int, int], ...]"
"""codes from fields: a function, or (field, bits, width) for `_unpack`, the lowest bits first"""


@dataclass(frozen=True)
class Layout:
    """The layout of a type's blocks."""

    fields: tuple[Field, ...]
    """in the order of the struct"""
    quants: CodeRange
    unpack: Unpack
    """of the quants"""
    sub_block: int = 0
    """elements that share a scale; 0 if the whole block does"""
    scales: CodeRange | None = None
    unpack_scales: Unpack = ()
    """of the scales and, if there are `mins`, of as many minima after them"""
    mins: CodeRange | None = None
    least_normal: float = 2.0**-14
    """smallest normal number in the format of `d`; smaller ones except 0 are denormal"""


def sub_block_of(type_: GgmlType) -> int:
    """Elements that share a scale; those of a block for a type without sub-blocks."""
    layout = LAYOUTS.get(type_.name)
    return (layout.sub_block if layout else 0) or type_.block


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of one type, decoded."""

    type: GgmlType
    layout: Layout
    parts: Parts

    @property
    def n_sub(self) -> int:
        """Sub-blocks of a block; 1 for a type without sub-blocks."""
        return self.type.block // sub_block_of(self.type)

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
        """(n_blocks, block): the elements as float32, bit-identical to ggml's."""
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
    at = _fields(layout, data)
    scales: Codes | None = None
    mins: Codes | None = None
    if layout.scales is not None:
        scales = _codes(at, layout.unpack_scales, layout.scales)
        if layout.mins is not None:
            n_sub = type_.block // layout.sub_block
            scales, mins = scales[:, :n_sub], scales[:, n_sub:]
    d = _power_of_two(at["e"]) if "e" in at else _half(at["d"])
    dmin = at.get("dmin", at.get("m"))
    parts = Parts(
        quants=_codes(at, layout.unpack, layout.quants),
        d=d,
        dmin=None if dmin is None else _half(dmin),
        scales=scales,
        mins=mins,
    )
    return Blocks(type_, layout, parts)


def _fields(layout: Layout, data: Bytes) -> Fields:
    ends = np.cumsum([field.n_bytes for field in layout.fields])
    parts = np.split(data, ends[:-1], axis=1)
    return {field.name: part for field, part in zip(layout.fields, parts, strict=True)}


def _quiet() -> np.errstate:
    """Keep NaN scales, without a warning."""
    return np.errstate(invalid="ignore", over="ignore")


def _codes(at: Fields, unpack: Unpack, codes: CodeRange) -> Codes:
    if callable(unpack):
        return unpack(at)
    (field, n_bits, width), *others = unpack
    found = _unpack(at[field], n_bits, width)
    for field, bits, width in others:
        found |= _unpack(at[field], bits, width) << n_bits
        n_bits += bits
    return found.view(np.int8) if codes.low < 0 else found


def _unpack(packed: Bytes, bits: int, width: int) -> Bytes:
    """Codes of `bits` bits: first the lowest bits of `width` consecutive bytes, then the next."""
    if bits == 8:
        return packed
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    grouped = packed.reshape(len(packed), -1, 1, width)
    codes: Bytes = (grouped >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def _half(field: Bytes) -> Floats | None:
    """A field of one float16 as float32; None for any other field."""
    if field.shape[1] != 2:
        return None
    numbers: NDArray[np.float16] = np.ascontiguousarray(field).view("<f2")
    return numbers[:, 0].astype(np.float32)


def _power_of_two(field: Bytes) -> Floats:
    """The scale of MXFP4, halved because the levels are doubled: `ggml_e8m0_to_fp32_half`
    (ggml-impl.h)."""
    scales: Floats = np.ldexp(np.float32(1), field[:, 0].astype(np.int32) - 128)
    return scales


def _q3_k_scales(at: Fields) -> Bytes:
    """16 6-bit scales, stored as 4 lower and 2 upper bits."""
    packed = at["scales"]
    codes: Bytes = _unpack(packed[:, :8], 4, 8) | _unpack(packed[:, 8:], 2, 4) << np.uint8(4)
    return codes


def _q4_k_scales(at: Fields) -> Bytes:
    """8 6-bit scales and 8 6-bit minima from 12 bytes, like `get_scale_min_k4` (ggml-quants.c)."""
    first, second, last = np.split(at["scales"], 3, axis=1)
    low = first & 63, (last & 0xF) | (first >> 6) << 4
    high = second & 63, (last >> 4) | (second >> 6) << 4
    return np.concatenate([*low, *high], axis=1)


def _ternary_digits(at: Fields) -> Bytes:
    """The digits of TQ1_0: five in a byte, as a fraction of 256; four in those of `qh`."""
    groups = [(at["qs"][:, :32], 5), (at["qs"][:, 32:], 5), (at["qh"], 4)]
    digits = []
    for packed, n_digits in groups:
        for i in range(n_digits):
            rest = packed * np.uint8(3**i)  # modulo 256, as in C
            digits.append((rest.astype(np.uint16) * 3 >> 8).astype(np.uint8))
    return np.concatenate(digits, axis=1)


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
_UE4M3 = CodeRange(0, 255, tuple(map(_ue4m3, range(256))), (0, 224))
_SIX_BITS = _integers(0, 63)

_D = Field("d", 2, "float16 scale")
_M = Field("m", 2, "float16 minimum")
_DMIN = Field("dmin", 2, "float16, for minima")
_K_SCALES = Field("scales", 12, "6-bit scales, minima")
# low nibbles are the first half of a block; the fifth bits have a field of their own
_NIBBLES = (("qs", 4, 16),)
_FIVE_BITS = (*_NIBBLES, ("qh", 1, 1))


def _qs(n_bytes: int, holds: str = "quants") -> Field:
    return Field("qs", n_bytes, holds)


def _qh(n_bytes: int) -> Field:
    return Field("qh", n_bytes, "quants: fifth bit")


LAYOUTS: dict[str, Layout] = {
    "Q4_0": Layout((_D, _qs(16)), _integers(0, 15, 8), _NIBBLES),
    "Q4_1": Layout((_D, _M, _qs(16)), _integers(0, 15), _NIBBLES),
    "Q5_0": Layout(
        (_D, _qh(4), _qs(16, "quants: lower 4 bits")), _integers(0, 31, 16), _FIVE_BITS,
    ),
    "Q5_1": Layout(
        (_D, _M, _qh(4), _qs(16, "quants: lower 4 bits")), _integers(0, 31), _FIVE_BITS,
    ),
    "Q8_0": Layout((_D, _qs(32)), _SIGNED_BYTES, (("qs", 8, 1),)),
    "Q2_K": Layout(
        (Field("scales", 16, "4-bit scales, minima"), _qs(64), _D, _DMIN),
        _integers(0, 3), (("qs", 2, 32),),
        16, _integers(0, 15), (("scales", 4, 16),), _integers(0, 15),
    ),
    "Q3_K": Layout(
        (Field("hmask", 32, "quants: third bit"), _qs(64, "quants: lower 2 bits"),
         Field("scales", 12, "6-bit scales"), _D),
        _integers(0, 7, 4), (("qs", 2, 32), ("hmask", 1, 32)),
        16, _integers(0, 63, 32), _q3_k_scales,
    ),
    "Q4_K": Layout(
        (_D, _DMIN, _K_SCALES, _qs(128)),
        _integers(0, 15), (("qs", 4, 32),), 32, _SIX_BITS, _q4_k_scales, _SIX_BITS,
    ),
    "Q5_K": Layout(
        (_D, _DMIN, _K_SCALES, _qh(32), _qs(128, "quants: lower 4 bits")),
        _integers(0, 31), (("qs", 4, 32), ("qh", 1, 32)), 32, _SIX_BITS, _q4_k_scales, _SIX_BITS,
    ),
    "Q6_K": Layout(
        (Field("ql", 128, "quants: lower 4 bits"), Field("qh", 64, "quants: upper 2 bits"),
         Field("scales", 16, "8-bit scales"), _D),
        _integers(0, 63, 32), (("ql", 4, 64), ("qh", 2, 32)),
        16, _integers(-128, 127), (("scales", 8, 1),),
    ),
    "IQ4_NL": Layout((_D, _qs(16, "indices of 16 levels")), _IQ4, _NIBBLES),
    "IQ4_XS": Layout(
        (_D, Field("scales_h", 2, "scales: upper 2 bits"),
         Field("scales_l", 4, "scales: lower 4 bits"), _qs(128, "indices of 16 levels")),
        _IQ4, _NIBBLES, 32, _integers(0, 63, 32), (("scales_l", 4, 1), ("scales_h", 2, 1)),
    ),
    "TQ1_0": Layout(
        (_qs(48, "quants: 5 in a byte"), Field("qh", 4, "quants: 4 in a byte"), _D),
        _integers(0, 2, 1), _ternary_digits,
    ),
    # ggml reads the fourth code as 2; its quantizer never writes it
    "TQ2_0": Layout((_qs(64), _D), CodeRange(0, 3, (-1, 0, 1, 2), (-1, 1)), (("qs", 2, 32),)),
    "MXFP4": Layout(
        (Field("e", 1, "scale: power of two"), _qs(16, "4-bit float quants")),
        _FP4, _NIBBLES, least_normal=2.0**-126,
    ),
    "NVFP4": Layout(
        (Field("d", 4, "8-bit float scales"), _qs(32, "4-bit float quants")),
        _FP4, (("qs", 4, 8),), 16, _UE4M3, (("d", 8, 1),),
    ),
    "Q1_0": Layout((_D, _qs(16, "signs")), CodeRange(0, 1, (-1, 1), (-1, 1)), (("qs", 1, 1),)),
    "Q2_0": Layout((_D, _qs(16)), _integers(0, 3, 1), (("qs", 2, 1),)),
}  # fmt: skip
"""by type name"""

assert all(sum(f.n_bytes for f in LAYOUTS[t].fields) == BY_NAME[t].block_bytes for t in LAYOUTS)


@dataclass(frozen=True, eq=False)
class OneBlock:
    weight: Weight
    index: int
    raw: dict[str, bytes]
    """its bytes by field name"""
    offset: int
    """bytes from the start of the file"""
    blocks: Blocks
    """this block alone"""
    reference: Floats | None
    """(block,) the values of the reference at the same place"""

    @property
    def place(self) -> tuple[int, int]:
        """(row, column) of its first element."""
        return place(self.weight, self.index)


def find_weight(model: ModelFile, name: str) -> Weight:
    """The tensor of that name. Raises `UsageError`, which suggests similar names."""
    if name not in model.by_name:
        raise no_tensor(model, name)
    return model.by_name[name]


def no_tensor(model: ModelFile, name: str) -> UsageError:
    """The error that no tensor has that name, which may be a pattern; suggests similar names."""
    names, bare = list(model.by_name), name.strip("*")
    close = [n for n in names if bare and bare in n] or difflib.get_close_matches(bare, names)
    some = ", ".join(map(repr, close[:3]))
    hint = f"did you mean {some}?" if close else f"it has {len(names)} tensors"
    return UsageError(f"{model.path} has no tensor {name!r} ({hint})")


def check_openable(model: ModelFile, weight: Weight) -> None:
    """Raises `UsageError` if the blocks of the tensor cannot be decoded."""
    if weight.type.name in LAYOUTS:
        if weight.n_bytes == 0:
            raise UsageError(f"{weight.path}: tensor {weight.name!r} has no elements")
        return
    why = "whose blocks cannot be opened" if weight.type.is_quantized else "which has no blocks"
    others = [w.name for w in model.weights if w.type.name in LAYOUTS]
    closest = difflib.get_close_matches(weight.name, others, n=1, cutoff=0)
    hint = f"try {closest[0]!r}" if closest else "quantize it first"
    raise UsageError(
        f"{weight.path}: tensor {weight.name!r} is {weight.type}, {why} ({hint}); "
        f"types that can be opened: {', '.join(LAYOUTS)}"
    )


def find_reference(model: ModelFile, weight: Weight) -> Weight:
    """The tensor of the reference model with the name of `weight`.

    Raises `UsageError` if it does not exist, has another shape, or a type that cannot be read.
    """
    reference = find_weight(model, weight.name)
    if reference.ne != weight.ne:
        raise UsageError(
            f"{reference.path}: tensor {reference.name!r} is {_shape(reference)}, not "
            f"{_shape(weight)} as in {weight.path}; give a file of the same model"
        )
    if reference.type.name not in (*_PLAIN, *LAYOUTS):
        raise UsageError(
            f"{reference.path}: tensor {reference.name!r} is {reference.type}, which cannot be "
            "read as reference; give the model in F32, F16 or BF16"
        )
    return reference


def load_block(weight: Weight, index: int, reference: Weight | None = None) -> OneBlock:
    """One block of a tensor that passed `check_openable`. Raises `UsageError` if the tensor has
    no block `index`."""
    type_ = weight.type
    n_blocks = weight.n_elements // type_.block
    if not 0 <= index < n_blocks:
        raise UsageError(
            f"{weight.path}: tensor {weight.name!r} has no block {index}; its blocks are numbered "
            f"0 to {n_blocks - 1}"
        )
    data = _read_blocks(weight, index, 1)
    raw = {name: part.tobytes() for name, part in _fields(LAYOUTS[type_.name], data).items()}
    values = None
    if reference is not None:
        values = load_values(reference, index * type_.block, type_.block)
    offset = weight.offset + index * type_.block_bytes
    return OneBlock(weight, index, raw, offset, decode_blocks(type_, data), values)


def load_values(weight: Weight, begin: int, count: int) -> Floats:
    """(count,) elements of a tensor as float32, from element `begin` on, in the file's order.

    Reads only the bytes it needs. `find_reference` must accept the type.
    """
    name, block = weight.type.name, weight.type.block
    first, last = begin // block, -(-(begin + count) // block)
    data = _read_blocks(weight, first, last - first)
    if name == "BF16":
        values = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    elif name in _PLAIN:
        with np.errstate(invalid="ignore", over="ignore"):
            values = data.view(_PLAIN[name]).astype(np.float32)
    else:
        values = decode_blocks(weight.type, data).values()
    return values.ravel()[begin - first * block :][:count]


def read_blocks(weight: Weight) -> Iterator[tuple[int, Blocks]]:
    """The blocks of a tensor, chunk by chunk, each with the index of its first block."""
    type_ = weight.type
    n_blocks, per_chunk = weight.n_elements // type_.block, CHUNK // type_.block
    for begin in range(0, n_blocks, per_chunk):
        yield (
            begin,
            decode_blocks(type_, _read_blocks(weight, begin, min(per_chunk, n_blocks - begin))),
        )


def place(weight: Weight, block: int) -> tuple[int, int]:
    """(row, column) of the first element of a block."""
    row, in_row = divmod(block, weight.ne[0] // weight.type.block)
    return row, in_row * weight.type.block


def _read_blocks(weight: Weight, begin: int, n_blocks: int) -> Bytes:
    """(n_blocks, block_bytes) as they are stored."""
    size = weight.type.block_bytes
    # read, not mapped: if the file is truncated meanwhile, this raises an error, and no SIGBUS
    try:
        offset = weight.offset + begin * size
        data = np.fromfile(weight.path, np.uint8, n_blocks * size, offset=offset)
    except OSError as error:
        raise UsageError(f"{weight.path} cannot be read: {error.strerror or error}") from None
    if len(data) != n_blocks * size:
        raise UsageError(f"{weight.path} ends inside tensor {weight.name!r}: it was truncated")
    return data.reshape(n_blocks, size)


def _shape(weight: Weight) -> str:
    return " x ".join(map(str, weight.ne))
