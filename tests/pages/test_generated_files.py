"""What is generated from the schema and the commands is up to date and says all of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import msgspec
import pytest
from jsonschema import Draft202012Validator

from llamacpp_instr import cli
from llamacpp_instr.log import schema
from llamacpp_instr.log.check import check_log
from tools import generate

ROOT = Path(__file__).parent.parent.parent


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
    for name in files.keys() - {generate.HEADER, generate.PAGE}:
        (tmp_path / name).write_text("", encoding="utf-8")
    assert generate.stale(tmp_path) == list(files)


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


@pytest.fixture(scope="module")
def json_schema() -> Draft202012Validator:
    document = json.loads((ROOT / generate.LOG_SCHEMA).read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(document)
    return Draft202012Validator(document)


@pytest.mark.parametrize("log", ["every-event.log", "demo-verbose.log"])
def test_the_json_schema_accepts_the_lines_of_a_log(
    json_schema: Draft202012Validator, log: str
) -> None:
    lines = (ROOT / "tests" / "fixtures" / log).read_text(encoding="utf-8").splitlines()
    for line in lines[:200]:
        json_schema.validate(json.loads(line))


@pytest.mark.parametrize("event", schema.EVENTS, ids=schema.event_name)
def test_the_json_schema_refuses_what_the_reader_refuses(
    json_schema: Draft202012Validator, event: type[schema.Event]
) -> None:
    examples = (generate.EXAMPLES, *generate.MORE_EXAMPLES)
    texts = [path.read_text(encoding="utf-8") for path in examples]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    example = next(line for line in lines if line["event"] == schema.event_name(event))
    for change in ({"t": "soon"}, {"t": None}, {"nonsense": 1}):
        wrong = example | change
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, schema.AnyEvent)
        assert not json_schema.is_valid(wrong)


def test_the_examples_are_from_logs_that_are_right():
    for path in (generate.EXAMPLES, *generate.MORE_EXAMPLES):
        assert list(check_log(path)) == []


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_page_of_the_commands_has_help_options_and_an_example_of_each(name):
    page = (ROOT / generate.CLI_PAGE).read_text(encoding="utf-8")
    assert f"\n- [`{name}`](#instr-{name}): {cli.COMMANDS[name]}\n" in page
    section = page.split(f"\n## instr {name}\n")[1].split("\n## ")[0]
    command = cli.main.get_command(click.Context(cli.main), name)
    assert command.help.strip().splitlines()[0] in section
    listed = re.findall(r"^- `([^`]+)`: \S", section, re.MULTILINE)
    names = {word.strip(",") for line in listed for word in line.split() if word[0] == "-"}
    assert names == {
        opt for p in command.params if isinstance(p, click.Option) and p.name != "help"
        for opt in p.opts
    }  # fmt: skip
    example = section.split("```sh\n")[1].split("\n```")[0]
    assert re.search(rf"(^|\| )instr {name}\b", example, re.MULTILINE)
