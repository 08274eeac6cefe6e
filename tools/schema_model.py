"""The event schema as data: its structs with their fields, units and docstrings.

Invariant: everything is read from `llamacpp_instr.log.schema`: types and defaults through msgspec,
the strings below fields from the source, because Python does not keep them.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass

import msgspec

from llamacpp_instr.log import schema


@dataclass(frozen=True)
class Field:
    """One key of a struct."""

    key: str
    type: str
    """as in the source"""
    required: bool
    default: object
    doc: str
    """the string below the field; empty if there is none"""


@dataclass(frozen=True)
class StructDoc:
    """One struct of the schema."""

    name: str
    """name of the Python class"""
    event: str
    """the event's name; empty for a part of events"""
    doc: str
    fields: tuple[Field, ...]


def all_structs() -> list[StructDoc]:
    """Every struct of the schema in source order, without the common base; its key `t` is the
    first of every event's."""
    tree = ast.parse(inspect.getsource(schema))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return [
        _struct(getattr(schema, name), node, classes["Event"])
        for name, node in classes.items()
        if name != "Event"
    ]


def _struct(cls: type, node: ast.ClassDef, base: ast.ClassDef) -> StructDoc:
    is_event = issubclass(cls, schema.Event)
    source = {**(_sources(base) if is_event else {}), **_sources(node)}
    fields = []
    for info in msgspec.structs.fields(cls):
        type_text, doc = source[info.encode_name]
        default = None if info.required else info.default
        if info.default_factory is not msgspec.NODEFAULT:
            default = info.default_factory()
        fields.append(Field(info.encode_name, type_text, info.required, default, doc))
    doc = inspect.cleandoc(ast.get_docstring(node) or "")
    return StructDoc(cls.__name__, schema.event_name(cls) if is_event else "", doc, tuple(fields))


def _sources(node: ast.ClassDef) -> dict[str, tuple[str, str]]:
    """Field name -> (its annotation, the string below it)."""
    found = {}
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        doc = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            doc = str(following.value.value)
        found[statement.target.id] = (ast.unparse(statement.annotation), doc)
    return found
