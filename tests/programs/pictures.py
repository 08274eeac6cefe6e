"""Takes the pictures of the docs: `make pictures`, or `python -m tests.programs.pictures`.

They show a session of the demo model as `instr view` opens it, one on a device, the first part of
its page, the model's weights, a stop in the debugger, a graph in Netron, and charts of reports;
they are not edited.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import netron

from llamacpp_instr.base.cpus import cpu_name
from llamacpp_instr.converters.analyses.caches import draw_caches
from llamacpp_instr.converters.analyses.probe import roofline
from llamacpp_instr.converters.scheduling.capacity.capacity import (
    Capacity,
    Load,
    parse_goal,
    recorded_server,
)
from llamacpp_instr.converters.scheduling.capacity.report import charts
from llamacpp_instr.lab.quality.caches import parse_cache_types
from llamacpp_instr.lab.quality.divergence import CacheTypes
from llamacpp_instr.lab.quality.logits import OutputOptions, compare_outputs
from llamacpp_instr.log.session import load_session
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.prediction.probe.file import probe_json, read_probe
from tests.conftest import ROOT, read_events
from tests.kit.backends import vulkan_environment, vulkan_module
from tests.kit.browser_kit import browser, debugged
from tests.kit.made_probe import probe_of
from tests.kit.native_kit import DEMO
from tests.kit.ui_kit import look, look_at_page, run_script, served
from tests.probe.test_probe import on_lavapipe
from tests.weights_view.test_weights_page import look as look_at_weights

IMAGES = ROOT / "docs" / "images"
WIDTH = 1400
PAGE = (1000, 1900)
RECORDINGS = 8
"""the least disturbed one is shown: on a busy machine a thread may wait for a CPU"""


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        log = min((record(Path(folder) / f"{i}") for i in range(RECORDINGS)), key=slowness)
        with served(log) as address:
            look(address, picture=IMAGES / "session.png", size=(WIDTH, 700))
        trace = log.with_suffix(".pftrace")
        # without the arrows, which cover the names
        instr("to-perfetto", log, "-o", trace)
        visible, op = close_up(log)
        with served(trace) as address:
            closer = f"{address}&visStart={visible[0]}&visEnd={visible[1]}"
            look(closer, select=op, picture=IMAGES / "layer.png", size=(1160, 880))
        take_device()
        take_roofline(Path(folder))
        take_page(Path(folder))
        take_weights(Path(folder))
        take_debugger(Path(folder))
        take_netron(Path(folder))
    take_capacity()
    take_caches()
    for picture in sorted(IMAGES.glob("*.png")):
        print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size:,} bytes")


def take_device() -> None:
    """The last layer and the output on lavapipe; the log is kept."""
    with served(ROOT / "tests" / "fixtures" / "vulkan-partly.log.gz") as address:
        look(address, picture=IMAGES / "device.png", size=(WIDTH, 640))


def take_roofline(folder: Path) -> None:
    """The demo model on lavapipe, under the roofs of that device."""
    there = {**vulkan_environment(), "GGML_BACKEND_PATH": str(vulkan_module())}
    log, machine = folder / "device.log", folder / "probe.json"
    instr("run", "demo", "-p", "Once upon a time", "-n", "8", "--log", log, environment=there)
    machine.write_bytes(probe_json(probe_of(cpu_name())))
    done = on_lavapipe("-o", str(machine), environment={**os.environ, **there})
    assert done.returncode == 0, done.stderr
    session, probe = load_session(log), read_probe(machine)
    (chart,) = roofline(session, probe)[1]
    (IMAGES / "roofline-device.png").write_bytes(chart.png())


def take_capacity() -> None:
    """How many clients the server of a tutorial can have, and why."""
    made = recorded_server(load_session(ROOT / "docs" / "tutorials" / "faster-server.log.gz"))
    capacity = Capacity(made, Load(made.workload))
    servers = [replace(made.settings, slots=n) for n in (2, 4)]
    points = [capacity.point(n, of) for of in servers for n in (1.0, 2.0, 4.0, 8.0, 16.0)]
    goal = parse_goal("first token p95 < 2 s")
    for name, chart in zip(
        ("capacity", "", "capacity-why"), charts(capacity, points, "Capacity", goal), strict=True
    ):
        if name:
            (IMAGES / f"{name}.png").write_bytes(chart.png())


def take_caches() -> None:
    """What four caches cost the demo model, by position."""
    types = [CacheTypes(), *parse_cache_types("q8_0,q4_0", "q8_0,q4_0")]
    files = [load_model_file(DEMO)] * len(types)
    outputs = compare_outputs(files, None, OutputOptions(threads=1), caches=types)
    (IMAGES / "kv-cache.png").write_bytes(draw_caches(outputs, files)[0].png())


def take_page(folder: Path) -> None:
    """The page of a longer session, from its beginning to the tree."""
    options = ("-n", "96", "--threads", "1")
    logs = [record(folder / f"long-{i}", *options) for i in range(RECORDINGS)]
    log = min(logs, key=whole_time)
    instr("page", log.name, cwd=log.parent)
    look_at_page(log.with_suffix(".html"), size=PAGE, picture=IMAGES / "page.png", whole=False)


def take_weights(folder: Path) -> None:
    """Weights of the demo model at the bounds of blocks, before and after quantizing."""
    instr("quantize", "demo", "--types", "Q4_K_M", "-o", folder / "model-Q4_K_M.gguf")
    (folder / "model-F16.gguf").symlink_to(DEMO)
    options = ("--view", "--reference", str(folder / "model-F16.gguf"))
    with served(folder / "model-Q4_K_M.gguf", *options, command="weights") as address:
        steps = [["tensor", "blk.1.ffn_down.weight"], ["go", 206, 256], ["keys", "-", "-"]]
        look_at_weights(
            address, steps, width=1400, picture=str(IMAGES / "weights.png"), whole=False
        )


def take_debugger(folder: Path) -> None:
    """A stop at a layer's attention, with a change."""
    prompt = "Once upon a time, there was a little"
    stop = "op=FLASH_ATTN_EXT layer=2"
    with debugged(folder, "demo", "-p", prompt, "-b", stop) as run, browser() as page:
        page.do("size", [1600, 1170])
        page.do("goto", run.address)
        page.wait("'visit' in document.body.dataset")
        page.click("#ablate-head")
        page.wait("document.querySelector('#changes li') !== null")
        page.do("picture", str(IMAGES / "debugger.png"), whole=False)
        page.click("#quit")


def take_netron(folder: Path) -> None:
    """The first operators of a decode of the demo model."""
    graph = folder / "decode.onnx"
    instr("to-onnx", "demo", "-o", graph)
    host, port = netron.start(str(graph), ("127.0.0.1", 0), browse=False)
    try:
        address = f"http://{host}:{port}"
        run_script("netron.mjs", address=address, picture=str(IMAGES / "netron.png"))
    finally:
        netron.stop()


def record(folder: Path, *options: str) -> Path:
    folder.mkdir()
    log = folder / "session.log"
    prompt = ("-p", "Once upon a time", *(options or ("-n", "24")))
    instr("run", "demo", *prompt, "--level", "verbose", "--log", log)
    return log


def instr(
    *words: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None
) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})}
    subprocess.run(
        [sys.executable, "-m", "llamacpp_instr", *words],
        cwd=cwd, env=env, check=True, capture_output=True,
    )  # fmt: skip


def slowness(log: Path) -> int:
    return sum(compute["dur"] for compute in read_events(log, "compute")[:4])


def whole_time(log: Path) -> int:
    return sum(compute["dur"] for compute in read_events(log, "compute"))


def close_up(log: Path) -> tuple[tuple[int, int], str]:
    """The time range of a decode's first layer, with a margin, and SQL for its attention op."""
    decodes = read_events(log, "layers")[1:]
    layers = min(decodes, key=lambda layers: layers["dur"][layers["layer"].index(0)])
    at = layers["layer"].index(0)
    begin = layers["t"] + sum(layers["gap"][: at + 1]) + sum(layers["dur"][:at])
    end = begin + layers["dur"][at]
    margin = (end - begin) // 40
    return (begin - margin, end + margin), (
        "select s.id from slice s join track t on t.id = s.track_id where t.name = 'layers'"
        f" and s.name = 'FLASH_ATTN_EXT' and s.ts between {begin} and {end}"
    )


if __name__ == "__main__":
    main()
