"""The standard operators of ggml's ops exist, as the onnx package defines them."""

from __future__ import annotations

import re

import pytest
from onnx import defs

from llamacpp_instr.log.graph import words
from llamacpp_instr.log.graph.words import OPSET, Standard, standard_operator
from tests.kit.native_kit import patched_tree

TABLES = {"": words.OPS, "UNARY ": words._UNARY, "GLU ": words._GLU}
ROWS = [(f"{of}{op}", row) for of, table in TABLES.items() for op, row in table.items()]


@pytest.mark.parametrize(("op", "row"), ROWS, ids=[op for op, _ in ROWS])
def test_every_operator_is_one_of_the_opset(op: str, row: Standard) -> None:
    for name in row.onnx:
        schema = defs.get_schema(name, OPSET)
        assert not schema.deprecated, f"{op}: {name}"


def test_the_opset_is_the_first_that_has_all_of_them() -> None:
    first: dict[str, int] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "":
            since = schema.since_version
            first[schema.name] = min(first.get(schema.name, since), since)
    assert max(first[name] for _, row in ROWS for name in row.onnx) == OPSET


def test_a_kind_decides_for_functions_of_elements_and_gates() -> None:
    assert standard_operator("UNARY", {"kind": "GELU"}).onnx == ("Gelu",)
    assert standard_operator("GLU", {"kind": "SWIGLU"}).onnx == ("Split", "Sigmoid", "Mul", "Mul")
    assert standard_operator("UNARY", {"kind": "XIELU"}) == Standard((), "")
    assert standard_operator("GLU", {}) == Standard((), "")


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("ADD", Standard(("Add",), "add")),
        ("ADD_ID", Standard(("Gather", "Add"), "add")),
        ("IM2COL", Standard((), "nn.functional.unfold")),
        ("GATED_DELTA_NET", Standard(("Scan",), "")),
        ("OF_TOMORROW", Standard((), "")),
    ],
)
def test_an_op_has_what_its_row_says_and_a_dash_is_none(op: str, wanted: Standard) -> None:
    assert standard_operator(op, {}) == wanted


@pytest.mark.native
def test_the_table_names_ops_of_ggml_only() -> None:
    header = (patched_tree() / "ggml/include/ggml.h").read_text()
    ops = set(re.findall(r"\bGGML_OP_([A-Z0-9_]+)", header))
    unary = set(re.findall(r"\bGGML_UNARY_OP_([A-Z0-9_]+)", header))
    glu = set(re.findall(r"\bGGML_GLU_OP_([A-Z0-9_]+)", header))
    assert set(words.OPS) <= ops
    assert set(words._UNARY) <= unary
    assert set(words._GLU) == glu - {"COUNT"}
