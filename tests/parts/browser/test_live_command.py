"""The page of `instr live` in Chromium, with a real recording."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from llamacpp_instr.log.requests import find_requests
from llamacpp_instr.log.session import load_session
from tests.kit import ui_kit
from tests.kit.browser_kit import browser
from tests.kit.computes import one_by_one
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.programs import recording
from tests.live.followed_logs import HOSTILE, open_log

pytestmark = pytest.mark.native


def look(
    address: str, width: int = 1280, click: bool = False, script: str = "live.mjs", **more: Any
) -> dict[str, Any]:
    """What Chromium shows of a session once it has ended, or what another script reports."""
    return ui_kit.run_script(script, address=address, width=width, click=click, **more)


APPLICATION = """
import sys, time
import llama_cpp, llamacpp_instr

model = llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False)
with llamacpp_instr.record(sys.argv[2]) as session:
    print("recording", flush=True)
    sys.stdin.readline()
    for number in range(3):
        with session.mark(f"request {number}") as span:
            model("Once upon a time", max_tokens=30, seed=number, temperature=1)
            span.seq = 0
"""


def test_the_page_shows_a_real_recording(tmp_path: Path) -> None:
    log = tmp_path / "session.log"
    with subprocess.Popen(
        [sys.executable, "-c", APPLICATION, str(DEMO), str(log)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as application:  # fmt: skip
        assert application.stdout is not None
        assert application.stdout.readline() == "recording\n"
        with ui_kit.served(log, command="live") as address:
            begin = threading.Timer(1.5, lambda: application.communicate("\n"))
            begin.start()
            seen = look(address, click=True)
            begin.join()
    session = load_session(log)
    _, requests = find_requests(session)
    assert (seen["errors"], seen["console"], seen["foreign"]) == ([], [], [])
    assert [lane["name"] for lane in seen["lanes"]] == ["request 2", "request 1", "request 0"]
    texts = session.tokens["text"].tolist()
    n = [len(request.token_times) for request in requests]
    assert [lane["text"] for lane in seen["lanes"]][::-1] == [
        "".join(texts[sum(n[:i]) : sum(n[: i + 1])]) for i in range(3)
    ]
    assert f"{len(session.steps)} steps" in seen["state"]
    assert f"{len(session.tokens)} tokens" in seen["state"]
    last = one_by_one(session.ops)[-1]
    assert seen["kernels"] == len(last.dur)


@pytest.mark.parametrize("width", [400, 1600])
def test_the_page_fits_and_what_a_log_says_stays_text(tmp_path: Path, width: int) -> None:
    log, rest = open_log(tmp_path)
    with ui_kit.served(log, command="live") as address:
        with log.open("ab") as file:
            file.write(rest)
        seen = look(address, width, dark=width == 400)
    assert (seen["errors"], seen["console"], seen["foreign"]) == ([], [], [])
    assert seen["overflow"] <= 0
    assert HOSTILE in seen["messages"]


def test_one_large_amount_does_not_hide_the_others(tmp_path: Path) -> None:
    """The output of a large vocabulary takes 300 times as long as a kernel of a layer."""
    log, _ = open_log(tmp_path)
    with ui_kit.served(log, command="live") as address, browser() as page:
        page.do("goto", address)
        drawn = page.read("""import("./draw.js").then(({drawHeat}) => {
            const canvas = document.createElement("canvas");
            const times = [[0], [300e6], [1e6], [4e6], [2e9]];
            drawHeat(canvas, times, times.slice(0, 4));
            const {data} = canvas.getContext("2d").getImageData(0, 0, 1, 5);
            return [...data].filter((_, i) => i % 4 === 2);
        })""")
    nothing, most, least, between, more = (255 - blue for blue in drawn)
    assert nothing < least < between < most == more
    assert (between - least) / (most - least) > 0.2


def test_one_looks_back_while_it_goes_on_and_opens_a_range(tmp_path: Path) -> None:
    log = tmp_path / "session.log"
    with (
        recording(log, "--requests", 4000),
        ui_kit.served(log, command="live") as address,
    ):
        seen = look(address, script="live_back.mjs", steps=400, open=True)
    assert (seen["errors"], seen["console"]) == ([], [])
    assert "paused" in seen["paused"]["state"]
    # the counting goes on, the drawing does not
    assert seen["later"]["state"] != seen["paused"]["state"]
    for what in ("lanes", "rate", "steps-note"):
        assert seen["later"][what] == seen["paused"][what]

    def shown_steps(of: str) -> tuple[int, int]:
        found = re.match(r"Steps ([\d,]+) to ([\d,]+),", seen[of]["steps-note"])
        assert found, seen[of]
        first, last = (int(number.replace(",", "")) for number in found.groups())
        return first, last

    # 120 pixels of 4 for each step
    assert shown_steps("dragged")[1] == shown_steps("paused")[1] - 30
    chosen = shown_steps("dragged")[1]
    assert seen["step"].startswith(f"Step {chosen}: ")
    assert seen["before"].startswith(f"Step {chosen - 1}: ")
    first, last = map(int, seen["href"].split("/")[1:])
    assert first < last
    assert f"{last} s" in seen["chosen"]["chosen-range"]
    assert f"{first}-{last}-s.1.pftrace" in seen["opened"]
    assert "paused" not in seen["resumed"]["state"]
    assert shown_steps("resumed")[1] > shown_steps("paused")[1]
    assert seen["resumed"]["shown-time"] == "up to now"
