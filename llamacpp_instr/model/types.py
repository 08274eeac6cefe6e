"""ggml's storage types and llama.cpp's file types, numbered and sized as in the pinned upstream.

Invariant: equal to what the library reports (`ggml_type_name`, `ggml_blck_size`, `ggml_type_size`).
A test compares the table with the library, so that using it needs no library.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERLEAVED = ("CPU_REPACK", "CPU_AARCH64", "CPU_KLEIDIAI", "AMX")
"""how the names of buffers begin if their weights are repacked for this processor's kernels"""


@dataclass(frozen=True)
class GgmlType:
    """A storage type: blocks of `block` elements in `block_bytes` bytes."""

    number: int
    name: str
    """in capitals, as in `Q4_K`; ggml's own name is `q4_K`, and that of Q8_0 is `q8_0`"""
    block: int
    """elements"""
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block

    @property
    def is_quantized(self) -> bool:
        """Whether elements are stored in quantized blocks, like `ggml_is_quantized`."""
        return self.block > 1

    def row_bytes(self, n_elements: int) -> int:
        """Bytes of a row, like `ggml_row_size`; `n_elements` must be a multiple of `block`."""
        assert n_elements % self.block == 0, f"{self.name} has blocks of {self.block}"
        return n_elements // self.block * self.block_bytes

    def __str__(self) -> str:
        return self.name


TYPES: dict[int, GgmlType] = {
    number: GgmlType(number, name, block, block_bytes)
    for number, name, block, block_bytes in [
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (9, "Q8_1", 32, 36),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
        (42, "Q2_0", 64, 18),
    ]
}
"""by ggml's number; missing numbers were removed from ggml"""

NOT_COMPUTED = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})
"""names of types without matrix multiplication (`ggml_type_traits_cpu` has no `vec_dot`), on which
ggml crashes"""

BY_NAME: dict[str, GgmlType] = {type_.name: type_ for type_ in TYPES.values()}


def type_named(name: str) -> GgmlType | None:
    """The type with a name as ggml and logs write it (`q4_K`, `q8_0`); None if it is unknown."""
    return BY_NAME.get(name.upper())


FILE_TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
"""`enum llama_ftype` (include/llama.h), the value of `general.file_type` -> llama-quantize's
name"""


def type_of(number: int) -> GgmlType:
    """The type with ggml's number; if it is unknown, one without a size."""
    return TYPES.get(number) or GgmlType(number, f"type {number}", 1, 0)
