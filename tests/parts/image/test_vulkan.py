"""The image with the Vulkan backend records the demo on its CPU device, Mesa's.

`make image-vulkan-test` builds it first, on Debian 13.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from llamacpp_instr.log.check import check_log
from tests.conftest import read_events
from tests.kit.device_logs import check_coverage, check_times
from tests.parts.image.container import Image
from tests.parts.image.test_image import NOBODY, owned


def test_the_demo_is_recorded_on_the_device_of_the_image(tmp_path: Path) -> None:
    script = """
        export GGML_VK_VISIBLE_DEVICES=0 LP_NUM_THREADS=0
        instr doctor --json
        instr run demo --prompt "Once upon a time" -n 4 --log /out/session.log >&2"""
    done = Image(os.environ["IMAGE"]).run(
        "-c", script, entrypoint=["sh"], user=NOBODY, volumes={owned(tmp_path, NOBODY): "/out"}
    )
    assert done.returncode == 0, done.stderr
    devices = {of["name"]: of["timed"] for of in json.loads(done.stdout)["library"]["devices"]}
    assert devices == {"CPU": "every op", "Vulkan0": "every op, by the device's time stamps"}
    log = tmp_path / "session.log"
    events = read_events(log)
    assert check_coverage(events)["Vulkan0"] > 200
    check_times(events)
    assert list(check_log(log)) == []


def test_without_a_device_it_records_on_the_cpu(tmp_path: Path) -> None:
    done = Image(os.environ["IMAGE"]).run(
        *("run", "demo", "--prompt", "Once", "-n", "4"),
        user=NOBODY,
        volumes={owned(tmp_path, NOBODY): "/out"},
    )
    assert done.returncode == 0, done.stderr
    assert check_coverage(read_events(tmp_path / "session.log")).keys() == {""}
