"""The log of a dry run is read completely, or gives an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.lab.quantize.plan import TENSOR_TYPES, QuantizeOptions, TensorPlan, read_dry_run
from llamacpp_instr.model.file import ModelFile, Weight
from llamacpp_instr.model.types import BY_NAME, GgmlType

SOURCE = Path("m.gguf")
NAMES = st.text(st.characters(blacklist_categories=["C"]), min_size=1, max_size=63).map(str.strip)
TYPES = st.sampled_from(list(TENSOR_TYPES.values()))


def model(*weights: Weight) -> ModelFile:
    return ModelFile(SOURCE, {}, list(weights))


def weight(name: str, type_: GgmlType = BY_NAME["F16"]) -> Weight:
    return Weight(name, type_, (256, 8), SOURCE, 0)


def line(weight: Weight, type_: GgmlType, index: int = 1, count: int = 1) -> str:
    """A line in llama.cpp's format (llama_model_quantize_impl)."""
    old, new = weight.type.name.lower(), type_.name.lower()
    size = f"size = {1:8.2f} MiB -> {0.5:8.2f} MiB ({new})"
    if type_ == weight.type:
        size = f"size = {1:8.3f} MiB"
    return f"[{index:4}/{count:4}] {weight.name:<36} - [  256,     8], type = {old:>6}, {size}"


def read(source: ModelFile, lines: list[str]) -> list[TensorPlan]:
    return read_dry_run(source, "Q4_0", QuantizeOptions(), lines)


@settings(max_examples=50)
@given(
    tensors=st.lists(
        st.tuples(NAMES.filter(bool), TYPES, TYPES),
        min_size=1,
        max_size=6,
        unique_by=lambda t: t[0],
    )
)
def test_every_name_and_type_comes_back(tensors: list[tuple[str, GgmlType, GgmlType]]) -> None:
    source = model(*(weight(name, old) for name, old, _ in tensors))
    lines = [line(w, new) for w, (_, _, new) in zip(source.weights, tensors, strict=True)]
    plans = read(source, ["llama_model_loader: - type  f32:   9 tensors", *lines])
    assert [(plan.name, plan.type) for plan in plans] == [(name, new) for name, _, new in tensors]


def test_a_fallback_is_reported_before_its_tensor() -> None:
    ffn = weight("blk.0.ffn_up.weight")
    warning = (
        f"warning: {ffn.name:<36} - ncols     96 not divisible by 256 (required for type    q4_K) "
        "-> falling back to    q5_0"
    )
    (plan,) = read(model(ffn), [warning, line(ffn, BY_NAME["Q5_0"])])
    assert (plan.type, plan.fallback_from) == (BY_NAME["Q5_0"], BY_NAME["Q4_K"])


@pytest.mark.parametrize(
    ("lines", "finding"),
    [
        ([], "does not list 'a.weight'"),
        ([line(weight("b.weight"), BY_NAME["Q8_0"])], "the file differ in 'b.weight'"),
        ([line(weight("a.weight"), BY_NAME["Q8_0"])] * 2, "the file differ in 'a.weight'"),
        ([line(weight("a.weight", BY_NAME["F32"]), BY_NAME["Q8_0"])], "the file differ in"),
        ([line(weight("a.weight"), BY_NAME["Q8_0"]).replace("q8_0", "q9_x")], "'q9_x'"),
    ],
)
def test_a_log_that_is_not_of_this_model(lines: list[str], finding: str) -> None:
    with pytest.raises(InstrError, match=finding):
        read(model(weight("a.weight")), lines)
