"""A wrong value in any field of any event is refused by every reader for the reason that `check`
gives, or by none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import inspect

from llamacpp_instr.log import schema
from llamacpp_instr.log.schema import EVENTS, event_name
from tests.kit.log_readers import assert_all_agree

FIXTURES = Path(__file__).parent.parent / "fixtures"
LOGS = [
    (FIXTURES / f"{name}.log").read_bytes().splitlines(keepends=True)
    for name in ("every-event", "rpc", "devices", "experts")
]
WRONG = (
    "null", "-1", str(2**63), "1e400", "NaN", '""', json.dumps("x" * 2000), "[]", "[[]]", "{}",
    "true", "1.5",
)  # fmt: skip
"""a value of each JSON type, and some that no field can have"""
Place = tuple["str | int", ...]
"""the keys that lead to a field, or to the first item of a list"""


class Case(NamedTuple):
    """A field of an event, in a log that has the event."""

    log: list[bytes]
    line: int
    place: Place


def places(of: inspect.Type, value: Any, place: Place = ()) -> Iterator[Place]:
    """Every field of a value of this type, also those that it lacks; of a list the first item."""
    if isinstance(of, inspect.UnionType):
        for part in of.types:
            yield from places(part, value, place)
    elif isinstance(of, inspect.StructType) and isinstance(value, dict):
        for field in of.fields:
            inner = (*place, field.encode_name)
            yield inner
            yield from places(field.type, value.get(field.encode_name), inner)
    elif isinstance(of, inspect.DictType) and value:
        inner = (*place, next(iter(value)))
        yield inner
        yield from places(of.value_type, value[inner[-1]], inner)
    elif isinstance(of, inspect.ListType) and value:
        yield (*place, 0)
        yield from places(of.item_type, value[0], (*place, 0))


def has(value: Any, place: Place) -> bool:
    try:
        for key in place:
            value = value[key]
    except KeyError:
        return False
    return True


def with_value(value: Any, place: Place, new: Any) -> Any:
    """A copy of the value with another one at a place."""
    if not place:
        return new
    key, *rest = place
    if isinstance(value, list):
        return [with_value(value[0], tuple(rest), new), *value[1:]]
    return {**value, key: with_value(value.get(key), tuple(rest), new)}


@cache
def cases() -> dict[str, dict[Place, Case]]:
    """Every field of every event, by the event's name; in a log where it has a value, if any
    does."""
    kinds = {event_name(kind): inspect.type_info(kind) for kind in EVENTS}
    made: dict[str, dict[Place, Case]] = {name: {} for name in kinds}
    without: set[tuple[str, Place]] = set()
    for log in LOGS:
        for line, text in enumerate(log):
            event = json.loads(text)
            name = event["event"]
            for place in places(kinds[name], event):
                if place not in made[name] or ((name, place) in without and has(event, place)):
                    made[name][place] = Case(log, line, place)
                    (without.discard if has(event, place) else without.add)((name, place))
    return made


def wrong_lines(case: Case) -> Iterator[bytes]:
    """The line with each wrong value that the schema allows, and with one that it does not: the
    readers share the decoder of lines."""
    event = json.loads(case.log[case.line])
    decode = msgspec.json.Decoder(schema.AnyEvent).decode
    refused = False
    for value in WRONG:
        changed = json.dumps(with_value(event, case.place, "\0wrong"))
        line = changed.replace(json.dumps("\0wrong"), value).encode()
        try:
            decode(line)
        except ValueError:
            if refused:
                continue
            refused = True
        yield line + b"\n"


def test_every_event_is_in_a_log() -> None:
    assert all(cases().values())
    assert sum(map(len, cases().values())) > 350


@pytest.mark.parametrize("name", list(map(event_name, EVENTS)))
def test_all_readers_refuse_it_or_none(name: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.log"
    for case in cases()[name].values():
        for line in wrong_lines(case):
            before, after = case.log[: case.line], case.log[case.line + 1 :]
            assert_all_agree(path, b"".join([*before, line, *after]))
