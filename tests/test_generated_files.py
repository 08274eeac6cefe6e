"""What is generated from the schema is up to date and says all of it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from llamacpp_instr import schema
from llamacpp_instr.check import check_log
from tools import generate

ROOT = Path(__file__).parent.parent


def test_nothing_generated_is_stale():
    assert generate.stale() == [], "run: python -m tools.generate"


def test_a_changed_file_is_stale(tmp_path):
    files = generate.generate()
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert generate.stale(tmp_path) == []
    (tmp_path / generate.HEADER).write_text(files[generate.HEADER] + "\n", encoding="utf-8")
    (tmp_path / generate.PAGE).unlink()
    assert generate.stale(tmp_path) == [generate.HEADER, generate.PAGE]


def test_the_header_defines_every_event_and_every_key_once():
    macros = dict(re.findall(r"#define LLAMA_INSTR_(\w+)\s+(\S+)", generate.render_header()))
    assert macros.pop("SCHEMA_VERSION") == str(schema.SCHEMA_VERSION)
    events = {value.strip('"') for name, value in macros.items() if name.startswith("EV_")}
    assert events == {schema.event_name(event) for event in schema.EVENTS}
    keys = [value.strip('"') for name, value in macros.items() if name.startswith("K_")]
    assert keys == sorted(set(keys))
    fields = {f.encode_name for event in schema.EVENTS for f in msgspec.structs.fields(event)}
    assert fields | {"event"} <= set(keys)


@pytest.mark.parametrize("event", schema.EVENTS, ids=schema.event_name)
def test_the_page_documents_every_event_with_every_key_and_an_example(event):
    page = (ROOT / generate.PAGE).read_text(encoding="utf-8")
    section = page.split(f"\n### {schema.event_name(event)}\n")[1].split("\n### ")[0]
    for field in msgspec.structs.fields(event):
        assert f"| `{field.encode_name}` |" in section
    example = section.split("```json\n")[1].split("\n```")[0]
    assert isinstance(msgspec.json.decode(example, type=schema.AnyEvent), event)


def test_the_examples_are_from_a_log_that_is_right():
    assert list(check_log(generate.EXAMPLES)) == []
