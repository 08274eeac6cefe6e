"""The table of storage types equals that of the pinned library, and of gguf-py."""

from __future__ import annotations

import ctypes
import re

import gguf
import pytest

from llamacpp_instr.llama import native
from llamacpp_instr.model.types import BY_NAME, FILE_TYPES, TYPES, GgmlType, type_named, type_of


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    lib = native.load().lib
    lib.ggml_type_name.restype = ctypes.c_char_p
    lib.ggml_blck_size.restype = ctypes.c_int64
    lib.ggml_type_size.restype = ctypes.c_size_t
    lib.ggml_row_size.restype = ctypes.c_size_t
    lib.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    lib.ggml_is_quantized.restype = ctypes.c_bool
    return lib


@pytest.mark.native
@pytest.mark.parametrize("type_", TYPES.values(), ids=str)
def test_a_type_is_ggmls(library: ctypes.CDLL, type_: GgmlType) -> None:
    assert library.ggml_type_name(type_.number).decode().upper() == type_.name.upper()
    assert library.ggml_blck_size(type_.number) == type_.block
    assert library.ggml_type_size(type_.number) == type_.block_bytes
    assert library.ggml_is_quantized(type_.number) == type_.is_quantized
    for blocks in (1, 3, 4096):
        n_elements = blocks * type_.block
        assert library.ggml_row_size(type_.number, n_elements) == type_.row_bytes(n_elements)


@pytest.mark.native
def test_no_type_of_ggml_is_missing(library: ctypes.CDLL) -> None:
    # GGML_TYPE_COUNT is not a symbol; ggml aborts on numbers beyond it
    known = {int(library_type) for library_type in gguf.GGMLQuantizationType}
    assert known <= set(TYPES)
    last = max(TYPES)
    assert all(library.ggml_type_size(n) == 0 for n in range(last) if n not in TYPES)


@pytest.mark.parametrize("type_", TYPES.values(), ids=str)
def test_a_type_has_the_number_and_the_sizes_of_gguf_py(type_: GgmlType) -> None:
    """Its Q8_1 is that of an older ggml."""
    theirs = {of.name: (of, *gguf.GGML_QUANT_SIZES[of]) for of in gguf.GGMLQuantizationType}
    theirs |= {"Q8_1": (9, 32, 2 + 2 + 32), "Q2_0": (42, 64, 2 + 64 // 4)}
    assert (type_.number, type_.block, type_.block_bytes) == theirs[type_.name]


def test_file_types_are_those_of_gguf_py() -> None:
    theirs = {of.value: re.sub("^(MOSTLY|ALL)_", "", of.name) for of in gguf.LlamaFileType}
    known = {number: name for number, name in FILE_TYPES.items() if name != "Q2_0"}
    assert known == {number: theirs[number] for number in known}
    assert len(known) == 35
    assert FILE_TYPES[41] == "Q2_0"


def test_a_type_that_is_not_known_has_no_size() -> None:
    assert type_of(0) is BY_NAME["F32"]
    assert type_of(4) == GgmlType(4, "type 4", 1, 0)
    assert type_named("q4_K") is type_named("Q4_K") is BY_NAME["Q4_K"]
    assert type_named("of_tomorrow") is None


def test_types_with_blocks_of_several_elements_are_quantized() -> None:
    plain = {type_.name for type_ in TYPES.values() if not type_.is_quantized}
    assert plain == {"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"}


def test_sizes_by_hand() -> None:
    # 4096 x 4096 in Q4_K: blocks of 256 in 2 + 2 + 12 + 128 bytes
    assert 4096 * BY_NAME["Q4_K"].row_bytes(4096) == 9_437_184
    assert BY_NAME["Q4_K"].bits_per_weight == 4.5
    assert BY_NAME["Q8_0"].bits_per_weight == 8.5


@pytest.mark.native
def test_file_types_are_those_of_llama_cpp() -> None:
    api = native.import_llama_cpp().llama_cpp
    theirs = {
        getattr(api, name): name.removeprefix("LLAMA_FTYPE_")
        .removeprefix("MOSTLY_")
        .removeprefix("ALL_")
        for name in dir(api)
        if name.startswith("LLAMA_FTYPE_") and name != "LLAMA_FTYPE_GUESSED"
    }
    assert theirs == FILE_TYPES
