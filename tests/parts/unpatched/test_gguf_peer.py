"""The pinned gguf.cpp accepts every header that we accept, so llama.cpp cannot abort on one."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.header import read_header
from tests.kit import native_kit

pytestmark = pytest.mark.native


class _Params(ctypes.Structure):
    """`struct gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


@pytest.fixture(scope="module")
def gguf_cpp_reads() -> Callable[[Path], bool]:
    """Whether the unpatched library reads a file's header."""
    library = ctypes.CDLL(str(native_kit.unpatched_library() / "libggml-base.so"))
    library.gguf_init_from_file.restype = ctypes.c_void_p
    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, _Params]
    library.gguf_free.argtypes = [ctypes.c_void_p]

    def reads(path: Path) -> bool:
        context = library.gguf_init_from_file(str(path).encode(), _Params(True, None))
        if context:
            library.gguf_free(context)
        return bool(context)

    return reads


NUMBERS = st.sampled_from([0, 1, 2, 3, 5, 8, 9, 12, 31, 32, 64, 2**15, 2**31, 2**32 - 1, 2**62,
                           2**63 - 1, 2**63, 2**64 - 1])  # fmt: skip
WRITTEN = st.one_of(
    st.binary(min_size=1, max_size=1),
    NUMBERS.map(lambda n: struct.pack("<I", n % 2**32)),
    NUMBERS.map(lambda n: struct.pack("<Q", n)),
)


def passes(path: Path) -> bool:
    try:
        load_model_file(path)
    except UsageError:
        return False
    return True


@settings(max_examples=250)
@given(name=st.sampled_from(["llama", "bert", "vocabulary"]), data=st.data())
def test_what_passes_is_read_by_gguf_cpp(
    gguf_cpp_reads: Callable[[Path], bool], models: Path, tmp_path: Path, name: str,
    data: st.DataObject,
) -> None:  # fmt: skip
    original = models / f"{name}.gguf"
    assert passes(original)
    assert gguf_cpp_reads(original)
    content = bytearray(original.read_bytes())
    place = st.integers(4, read_header(original).data_start - 1)
    for at, written in data.draw(st.lists(st.tuples(place, WRITTEN), min_size=1, max_size=3)):
        content[at : at + len(written)] = written
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(content)
    assert gguf_cpp_reads(changed) or not passes(changed)
