"""Load and times in a log are those of the kernel's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import read_events
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.programs import in_namespace, python

pytestmark = pytest.mark.native
# The kernel's files with known content, in a namespace of its own. Each session begins with one
# content and has its only step after the next.
WRITTEN = """
import os, sys
from tests.kit.decoder import Decoder
import llamacpp_instr

model, folder = sys.argv[1:]
decoder = Decoder(model)

def write(user, steal, load):
    stat = f"cpu  {user} 200 300 4000 5000 600 700 {steal} 900 0\\n" if load else ""
    for name, text in (("stat", stat), ("loadavg", load)):
        with open(f"{folder}/{name}", "r+") as file:
            file.truncate()
            file.write(text)

contents = [(1000, 80, "1.25 2.50 3.75 4/567 890"), (1234, 85, "0.07 2.50 3.75 4/567 890"),
            (1111, 81, "12.34 2.50 3.75 0/567 890"), (1, 1, ""), (2, 2, "")]
write(*contents[0])
for number, content in enumerate(contents[1:]):
    with llamacpp_instr.record(f"{folder}/{number}.log", level="minimal"):
        write(*content)
        decoder.decode({0: [1]})
"""


def test_load_and_times_are_those_of_the_kernels_files(tmp_path: Path) -> None:
    for name in ("stat", "loadavg"):
        (tmp_path / name).touch()
    script = 'for file in stat loadavg; do mount --bind "$1/$file" /proc/$file; done; shift; "$@"'
    done = in_namespace(script, str(tmp_path), *python(WRITTEN, DEMO, tmp_path), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    tick = 10**9 // os.sysconf("SC_CLK_TCK")
    keys = ("load", "running", "busy", "steal")
    recorded = [
        {key: event[key] for key in keys if key in event}
        for number in range(4)
        for event in read_events(tmp_path / f"{number}.log", "machine")
    ]
    assert recorded == [
        {"load": 0.07, "running": 3, "busy": 234 * tick, "steal": 5 * tick},
        {"load": 12.34, "running": 0, "busy": 0, "steal": 0},  # a counter that went back
        {},
        {},
    ]
