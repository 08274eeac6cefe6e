"""`instr schedule` on logs and graphs by hand, and one line for each wrong input."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.converters.scheduling.schedule import schedule_list
from llamacpp_instr.converters.scheduling.sources import recorded_graph
from llamacpp_instr.converters.scheduling.split import divide
from llamacpp_instr.converters.scheduling.tasks import equal_engines, several_sequences
from llamacpp_instr.log.session import load_session
from tests.conftest import Instr, assert_refused
from tests.kit.commands_kit import blocks_of
from tests.kit.in_process import instr_here, json_reports
from tests.kit.native_kit import DEMO, ROOT

LOG = ROOT / "tests" / "fixtures" / "demo-verbose.log"
GRAPH = """
[[task]]
name = "a"
ns = 300
[[task]]
name = "b"
ns = 200
[[task]]
name = "c"
ns = 100
after = ["a", "b"]
"""


def figures(*words: object) -> dict[str, Any]:
    whole, *_ = json_reports("schedule", *words)
    return {name: of["value"] for name, of in whole["figures"].items()}


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "graph.toml"
    path.write_text(GRAPH)
    return path


def test_the_command_schedules_what_the_parts_of_it_do() -> None:
    timed = recorded_graph(load_session(LOG), layers=(0, 1)).timed
    for split in ("none", "rows", "tiles"):
        tasks = divide(timed, split, equal_engines(3)).tasks
        made = schedule_list(several_sequences(tasks, 2), equal_engines(3))
        words = ("--engines", 3, "--split", split, "--layers", "0:1", "--sequences", 2)
        found = figures(LOG, *words)
        assert found["makespan"] == made.makespan
        assert found["tasks"] == 2 * len(tasks)
        assert found["sequence"] == 2 * tasks.ns.sum()


def test_one_engine_takes_as_long_as_the_kernels_of_the_log() -> None:
    total = int(recorded_graph(load_session(LOG)).timed.ns.sum())
    for policy in ("program", "list"):
        assert figures(LOG, "--engines", 1, "--policy", policy)["makespan"] == total
    assert figures(LOG, "--engines", 1, "--tokens", 3)["makespan"] == 3 * total


def test_a_prefill_beside_a_decode() -> None:
    both = figures(LOG, "--engines", 1, "--beside-prefill")
    of = [figures(LOG, "--engines", 1, "--phase", phase) for phase in ("decode", "prefill")]
    assert both["makespan"] == of[0]["makespan"] + of[1]["makespan"]
    assert both["tasks"] == of[0]["tasks"] + of[1]["tasks"]


def test_a_graph_by_hand(graph: Path) -> None:
    assert figures(graph, "--engines", 1)["makespan"] == 600
    for policy in ("program", "list", "optimal"):
        assert figures(graph, "--engines", 2, "--policy", policy)["makespan"] == 400


def test_the_files_of_the_page_can_be_used(tmp_path: Path) -> None:
    engines, devices, graph = (tmp_path / f"{name}.toml" for name in ("cpu", "gpus", "graph"))
    blocks = blocks_of(ROOT / "docs" / "how-to" / "schedule-what-if.md", "toml")
    for path, text in zip((engines, devices, graph), blocks, strict=True):
        path.write_text(text)
    assert figures(LOG, "--engines", engines)["makespan"] > 0
    on_device = LOG.with_name("vulkan-timed.log.gz")
    one = figures(on_device, "--engines", 1)["makespan"]
    assert one / 2 > figures(on_device, "--engines", devices)["makespan"] > one / 4
    assert figures(graph, "--engines", 2)["makespan"] == 500


def test_a_sweep_is_the_schedules_one_by_one() -> None:
    (table,) = json_reports("schedule", LOG, "--layers", 0, "--split", "rows", "--sweep", "1:5")
    assert [row["engines"] for row in table["rows"]] == [1, 2, 3, 4, 5]
    for row in table["rows"]:
        words = ("--layers", 0, "--split", "rows", "--engines", row["engines"])
        assert figures(LOG, *words)["makespan"] == row["makespan"]


def test_the_trace_and_the_page_are_written(tmp_path: Path) -> None:
    trace, page = tmp_path / "a.pftrace", tmp_path / "a.html"
    words = ("--layers", 0, "--perfetto", trace, "-o", page)
    assert instr_here("schedule", LOG, *words).returncode == 0
    assert trace.stat().st_size > 1000
    assert "<svg" in page.read_text()
    assert_refused(instr_here("schedule", LOG, *words), "exists")
    assert instr_here("schedule", LOG, *words, "--force").returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((LOG, "--layers", "7-9"), f"{LOG.name}: no layer 7 to schedule; its layers are 0 to 3"),
        ((LOG, "--step", "999"), f"{LOG.name}: no step 999; its steps are 0 to 23"),
        ((LOG, "--step", "1", "--phase", "decode"), "--phase or --step"),
        (
            (LOG, "--phase", "encode"),
            f"{LOG.name}: no encode to schedule; it has prefill and decode: choose with --phase",
        ),
        ((LOG, "--engines", "0"), "engines"),
        ((LOG, "--engines", "nowhere.toml"), "nowhere.toml"),
        ((LOG, "--sweep", "0:3"), "--sweep 0-3"),
        ((LOG, "--sweep", "1:"), "--sweep 1-"),
        ((LOG, "--sweep", "1:4", "--engines", "3"), "leave out --engines"),
        ((LOG, "--sweep", "1:4", "--perfetto", "a"), "leave out --perfetto"),
        ((LOG, "--perfetto", "-"), "--perfetto -"),
        (("GRAPH", "--split", "rows"), "is scheduled unchanged"),
        (("GRAPH", "--layers", "0"), "is scheduled unchanged"),
        (("nowhere.log",), "nowhere.log"),
    ],
)
def test_a_wrong_input_is_one_line(words: tuple[object, ...], message: str, graph: Path) -> None:
    arguments = [graph if word == "GRAPH" else word for word in words]
    assert_refused(instr_here("schedule", *arguments), message)


def test_parts_of_flash_attention_are_timed_where_it_ran(tmp_path: Path) -> None:
    """For a log from another processor, they cannot be timed here."""
    elsewhere = tmp_path / "elsewhere.log"
    recorded = re.sub(rb'"cpu":"[^"]*"', b'"cpu":"Sirius 9"', LOG.read_bytes(), count=1)
    elsewhere.write_bytes(recorded)
    done = instr_here("schedule", elsewhere, "--split", "heads")
    assert_refused(done, "recorded on Sirius 9, but this machine is ", "--flash-attn off")


@pytest.mark.native
def test_heads_of_a_recording_of_this_machine(instr: Instr, tmp_path: Path) -> None:
    for flash in ("on", "off"):
        log = tmp_path / f"{flash}.log"
        words = ("-p", "Once upon a time", "-n", 4, "--threads", 1, "--flash-attn", flash)
        assert instr("run", DEMO, *words, "--log", log).returncode == 0
        whole, *_ = json_reports("schedule", log, "--layers", 1, "--split", "heads")
        assert whole["figures"]["tasks"]["value"] == {"on": 49, "off": 53}[flash]
        assert any("were timed on this machine" in note for note in whole["notes"])
