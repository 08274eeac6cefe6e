"""The page of `instr live` says how many frames it lost while it was away."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kit import ui_kit
from tests.kit.programs import line, program, say
from tests.live.test_viewers import watched
from tests.parts.limits.test_viewers import KEPT, SERVER

pytestmark = pytest.mark.native


def test_the_page_says_how_many_frames_it_lost(tmp_path: Path) -> None:
    log = tmp_path / "session.log"
    with program(*watched(log, "--requests", 10**6, "--pace", 0.01)) as application:
        assert line(application) == "recording"
        with program("-c", SERVER, log) as server:
            address = line(server)
            say(application)
            seen = ui_kit.run_script("live_away.mjs", address=address, away=KEPT + 5)
    assert "not shown" not in seen["before"]
    found = re.search(r"([\d,]+) frames were not shown", seen["lost"])
    assert found
    assert int(found[1].replace(",", "")) > KEPT
    assert seen["lost"].startswith("Recording"), "and goes on"
