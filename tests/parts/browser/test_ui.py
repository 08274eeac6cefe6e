"""What a user sees: traces in Perfetto's own UI, in Chromium, through `instr view`."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Instr, read_events
from tests.kit.ui_kit import Seen, look, served

pytestmark = pytest.mark.native
QUERIES = {
    "slices": "select name, count(*), sum(dur) from slice group by name",
    "flows": """
        select count(*) from flow join slice on slice_out = slice.id
        where category <> 'request'""",
    "served": """
        select b.category, count(*) from flow join slice a on slice_out = a.id
        join slice b on slice_in = b.id where a.category = 'request' group by 1""",
    "tokens": """
        select name from slice where depth = 1 and category = 'token' order by ts""",
    "cells": """
        select cast(value as int) from counter join track on track_id = track.id
        where name = 'KV cells' order by ts""",
    "problems": """
        select name, value from stats
        where severity in ('error', 'data_loss') and value > 0""",
}
# the layers' track has what is known of an op; the threads' tracks have its time on each
AN_ATTENTION = """
    select slice.id as id from slice join track on track_id = track.id
    where slice.name = 'FLASH_ATTN_EXT' and track.name = 'layers' order by ts limit 1"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's prefill and a few decodes, with two threads."""
    path = tmp_path_factory.mktemp("ui") / "story.log"
    subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", "run", "demo", "--prompt", "Once upon a time",
         "-n", "8", "--threads", "2", "--level", "verbose", "--log", path],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def seen(log: Path) -> Seen:
    with served(log) as address:
        return look(address, QUERIES, AN_ATTENTION)


def kernels(log: Path) -> list[tuple[str, int]]:
    """Ops joined by + and duration of every kernel of the first thread, straight from the log."""
    graphs = {graph["graph"]: graph["nodes"] for graph in read_events(log, "graph")}
    plans = {plan["plan"]: plan for plan in read_events(log, "plan")}
    found = []
    for event in read_events(log, "ops"):
        if event.get("thread", 0) == 0:
            plan = plans[event["plan"]]
            nodes = graphs[plan["graph"]]
            counts = plan.get("n") or [1] * len(plan["node"])
            for first, n, dur in zip(plan["node"], counts, event["dur"], strict=True):
                inside = [i for i in range(first, first + n) if nodes["exec"][i]]
                found.append(("+".join(nodes["op"][i] for i in inside), dur))
    return found


def test_the_trace_opens_without_a_complaint(seen: Seen) -> None:
    assert seen.title.startswith("story.pftrace")
    assert seen.dialog is None
    assert seen.import_errors == 0
    assert seen.rows["problems"] == []
    assert seen.errors == []


def test_nothing_leaves_the_machine(seen: Seen) -> None:
    assert seen.foreign == []
    assert any(path.endswith("/story.pftrace") for path in seen.requests)
    assert any(path.endswith(".wasm") for path in seen.requests)


def test_the_kit_sees_what_would_leave() -> None:
    """The check above can fail: here, a page without our policy calls other hosts."""
    page = b"""<script>
        fetch('http://elsewhere.example/collect').catch(() => {});
        fetch('https://secure.example/').catch(() => {});
        fetch('http://127.0.0.1:9001/status').catch(() => {});
        new WebSocket('ws://socket.example/');
        setTimeout(() => { self.app = {}; const d = document.createElement('p');
            d.className = 'pf-modal-dialog'; document.body.append(d) }, 1000);
        </script>"""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        seen = look(f"http://127.0.0.1:{server.server_port}/", must_load=False)
        server.shutdown()
    for host in ("elsewhere.example", "secure.example", "127.0.0.1:9001", "socket.example"):
        assert any(host in address for address in seen.foreign), host


def test_the_tracks_stand_in_their_order(seen: Seen) -> None:
    names = [track.name for track in seen.tracks]
    inside = names[names.index("session") :]
    wanted = [
        "session", "marks", "requests", "phases", "layers", "threads", "thread 0", "thread 1",
        "sampler",
        "tokens/s", "KV", "KV cells", "KV bytes", "memory",
    ]  # fmt: skip
    assert inside[: len(wanted)] == wanted
    depth = {track.name: track.depth for track in seen.tracks}
    assert depth["session"] == 0
    assert depth["layers"] == depth["threads"] == 1
    assert depth["thread 0"] == depth["KV cells"] == 2


def test_steps_and_layers_are_the_first_that_one_sees(seen: Seen, log: Path) -> None:
    assert seen.pinned == ["session", "layers"]
    assert seen.drawn[:2] == ["session", "layers"]
    assert all(track.expanded for track in seen.tracks if track.name in ("session", "threads"))
    # on the screen: all of the first three decodes, and of the prefill at least the end
    begins = [e["t"] for e in read_events(log, "step_begin")]
    ends = [e["t"] for e in read_events(log, "step_end")]
    assert begins[0] < ends[0] < begins[1]
    assert begins[0] <= seen.visible[0] < ends[0]
    assert seen.visible[1] == ends[3]


def test_the_slices_are_those_of_the_log(seen: Seen, log: Path) -> None:
    found = {name: (count, dur) for name, count, dur in seen.rows["slices"]}
    steps = read_events(log, "step_begin")
    assert found["prefill"][0] == 1
    assert found["decode"][0] == len(steps) - 1
    ops = kernels(log)
    shown: Counter[str] = Counter()
    for name, (count, _) in found.items():
        shown[name.partition(" ")[0]] += count
    for name, count in Counter(name for name, _ in ops).items():
        # once on the layers' track, once for each of the two threads
        assert shown[name] == 3 * count, name
    computes = len(read_events(log, "compute"))
    for layer in range(4):
        assert found[f"layer {layer}"][0] == computes
    assert found["attention"][0] >= 4 * computes
    assert found["feed-forward"][0] == 4 * computes


def test_the_steps_carry_the_text_of_their_tokens(seen: Seen, log: Path) -> None:
    texts = [token["text"] for token in read_events(log, "token")]
    assert [row[0].strip('"') for row in seen.rows["tokens"]] == texts


def test_the_counters_are_those_of_the_log(seen: Seen, log: Path) -> None:
    used = [event["used"] for event in read_events(log, "kv")]
    assert [row[0] for row in seen.rows["cells"]] == used


def test_a_selected_op_shows_what_it_is(seen: Seen) -> None:
    for word in ("FLASH_ATTN_EXT", "tensor", "layer", "block", "attention", "flops", "bytes"):
        assert word in seen.details, seen.details
    assert "f16" in seen.details, "the type of what it reads"


def test_flows_lead_from_the_request_to_each_step(seen: Seen, log: Path) -> None:
    assert seen.rows["served"] == [["step", len(read_events(log, "step_begin"))]]


def test_flows_lead_from_an_op_to_its_readers(seen: Seen) -> None:
    assert seen.rows["flows"][0][0] > 0
    assert "Preceding Flows" in seen.details
    assert "Following Flows" in seen.details


@pytest.mark.parametrize("name", ["story.pftrace", "story.pftrace.gz"])
def test_a_trace_is_shown_as_it_is(
    name: str, log: Path, seen: Seen, tmp_path: Path, instr: Instr
) -> None:
    trace = tmp_path / name
    gzip = ["--gzip"] * name.endswith("gz")
    assert instr("to-perfetto", log, "-o", trace, *gzip).returncode == 0
    with served(trace) as address:
        shown = look(address, QUERIES)
    assert shown.title.startswith(name)
    assert shown.import_errors == 0
    assert shown.foreign == []
    assert shown.pinned == seen.pinned
    assert shown.rows["slices"] == seen.rows["slices"]
    assert shown.rows["flows"] == [[0]], "they are drawn when asked for"


def test_chrome_json_opens_as_well(log: Path, seen: Seen, tmp_path: Path, instr: Instr) -> None:
    trace = tmp_path / "story.json"
    assert instr("to-perfetto", log, "--format", "json", "-o", trace).returncode == 0
    with served(trace) as address:
        shown = look(address, QUERIES)
    assert shown.import_errors == 0
    assert shown.rows["problems"] == []
    ops = {name for name, _ in kernels(log)}
    found = {name: (count, dur) for name, count, dur in shown.rows["slices"]}
    native = {name: (count, dur) for name, count, dur in seen.rows["slices"]}
    titles = [name for name in native if name.partition(" ")[0] in ops]
    assert len(titles) > len(ops)
    for name in [*titles, "prefill", "decode", "layer 0", "attention", "feed-forward"]:
        assert found[name] == native[name], name
