"""Types that replace others, by llama-quantize's rules, in files whose types are written down."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from llamacpp_instr.lab.quantize.plan import find_fallbacks, has_mixture
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.types import BY_NAME
from tests.kit.gguf_files import save

ROWS = 4
Found = dict[str, tuple[list[str], int]]


def fallbacks(
    path: Path, file_type: int | None, tensors: dict[str, tuple[str, int]], arch: str = "llama",
    experts: int = 0,
) -> Found:  # fmt: skip
    """By weight: the types that may have been wanted, and the additional bytes. `tensors` have a
    type and the length of a row; each has four rows."""
    path.unlink(missing_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    if file_type is not None:
        writer.add_file_type(file_type)
    if experts:
        writer.add_expert_count(experts)
    for name, (type_name, row) in tensors.items():
        of = BY_NAME[type_name]
        data = np.zeros((ROWS, row // of.block * of.block_bytes), np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType(of.number))
    save(writer)
    found = find_fallbacks(load_model_file(path))
    return {of.weight.name: ([t.name for t in of.wanted], of.more_bytes) for of in found}


UP, HEAD, EMBEDDING = "blk.0.ffn_up.weight", "output.weight", "token_embd.weight"
OTHER_HEAD = {HEAD: ("Q6_K", 256)}
Q4_K_M, Q5_K_M, Q2_K, IQ3_XXS, Q8_0, Q4_0 = 15, 17, 10, 23, 7, 2


@pytest.mark.parametrize(
    ("file_type", "has", "wanted", "bits"),
    [
        # bits per weight: of the type in the file, and of the smallest that may have been wanted
        (Q4_K_M, "Q5_0", ["Q4_K"], (5.5, 4.5)),
        (Q4_K_M, "Q5_1", ["Q5_K"], (6.0, 5.5)),
        (Q4_K_M, "Q8_0", ["Q6_K"], (8.5, 6.5625)),
        (Q2_K, "Q4_0", ["Q2_K", "Q3_K"], (4.5, 2.625)),
        (IQ3_XXS, "IQ4_NL", ["IQ3_XXS", "IQ2_S", "IQ3_S"], (4.5, 2.5625)),
    ],
)
def test_the_second_type_names_the_first(
    tmp_path: Path, file_type: int, has: str, wanted: list[str], bits: tuple[float, float]
) -> None:
    """288 is a multiple of 32 but not of 256."""
    path = tmp_path / "m.gguf"
    found = fallbacks(path, file_type, {UP: (has, 288), **OTHER_HEAD})
    more = 288 * ROWS * (bits[0] - bits[1]) / 8
    assert found == {UP: (wanted, round(more))}
    assert fallbacks(path, file_type, {UP: (has, 512), **OTHER_HEAD}) == {}


def test_f16_is_for_rows_that_no_block_divides(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    found = fallbacks(path, Q8_0, {UP: ("F16", 40), **OTHER_HEAD})
    assert found == {UP: (["Q8_0"], 40 * ROWS * (16 - 8.5) / 8)}
    assert fallbacks(path, Q8_0, {UP: ("F16", 64), **OTHER_HEAD}) == {}
    found = fallbacks(path, Q4_K_M, {UP: ("F16", 40), **OTHER_HEAD})
    assert found == {UP: (["Q4_K", "Q5_K", "Q6_K"], 40 * ROWS * (16 - 4.5) / 8)}


def test_only_what_is_quantized_can_fall_back(tmp_path: Path) -> None:
    names = {
        "blk.0.attn_norm.weight": False, "blk.0.ffn_gate_inp.weight": False,
        "position_embd.weight": False, "token_types.weight": False, "blk.0.ffn_up.bias": False,
        "blk.0.ssm_conv1d.weight": False, "blk.0.ffn_down.weight": True,
        "blk.0.ffn_gate.weight": True,
    }  # fmt: skip
    found = fallbacks(
        tmp_path / "m.gguf", Q4_K_M, {**dict.fromkeys(names, ("Q5_0", 288)), **OTHER_HEAD}
    )
    assert set(found) == {name for name, quantized in names.items() if quantized}


@pytest.mark.parametrize("name", [HEAD, EMBEDDING])
def test_the_head_becomes_q8_0_in_silence(tmp_path: Path, name: str) -> None:
    """The embeddings are the head of a model without one."""
    path = tmp_path / "m.gguf"
    q6 = (["Q6_K"], round(288 * ROWS * (8.5 - 6.5625) / 8))
    for file_type in (Q4_K_M, Q2_K):
        assert fallbacks(path, file_type, {name: ("Q8_0", 288)}) == {name: q6}
        assert fallbacks(path, file_type, {name: ("Q8_0", 256)}) == {}
    q5 = (["Q5_K"], round(288 * ROWS * (8.5 - 5.5) / 8))
    assert fallbacks(path, IQ3_XXS, {name: ("Q8_0", 288)}) == {name: q5}
    assert fallbacks(path, Q4_0, {name: ("Q8_0", 288)}) == {name: q6}
    assert fallbacks(path, Q8_0, {name: ("Q8_0", 288)}) == {}
    # rows that 32 does not divide, either
    assert fallbacks(path, Q4_K_M, {name: ("F16", 40)})[name][0] == ["Q6_K"]
    # embeddings beside a head are like any weight
    beside = fallbacks(path, Q4_K_M, {EMBEDDING: ("Q5_0", 288), **OTHER_HEAD})
    assert beside[EMBEDDING][0] == ["Q4_K"]


def test_q8_0_that_every_mixture_has_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    value, up = "blk.0.attn_v.weight", "blk.0.ffn_up.weight"
    both = {value: ("Q8_0", 288), up: ("Q8_0", 288), **OTHER_HEAD}
    assert set(fallbacks(path, Q4_K_M, both)) == {value, up}
    assert set(fallbacks(path, Q4_K_M, both, experts=8)) == {up}
    assert set(fallbacks(path, Q4_K_M, both, experts=4)) == {value, up}
    wider = {value: ("Q5_0", 288), **OTHER_HEAD}
    assert set(fallbacks(path, Q4_K_M, wider, experts=8)) == {value}
    head = {HEAD: ("Q8_0", 288), up: ("Q8_0", 288)}
    assert set(fallbacks(path, Q4_K_M, head, "falcon")) == {up}
    assert set(fallbacks(path, Q4_K_M, head, "llama")) == {up, HEAD}
    query = {"blk.0.attn_q_a.weight": ("Q8_0", 288), up: ("Q8_0", 288), **OTHER_HEAD}
    assert set(fallbacks(path, Q4_K_M, query, "glm5-next")) == {up}
    assert len(fallbacks(path, Q4_K_M, query, "llama")) == 2


def test_without_a_mixture_nothing_is_known(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for file_type, known in ((None, False), (1, False), (Q4_K_M, True), (Q4_K_M + 1024, True)):
        found = fallbacks(path, file_type, {UP: ("Q5_0", 288), **OTHER_HEAD})
        assert bool(found) == has_mixture(load_model_file(path)) == known
