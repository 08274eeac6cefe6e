"""The live view of the recorded server: `instr live`, viewers and a page, for the whole time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.kit import ui_kit
from tests.kit.native_kit import ROOT
from tests.load.account import Recording
from tests.load.server import PATIENCE_S, memory_of

VIEWERS = 4
SAMPLE_S = 1.0


@dataclass
class LiveView:
    """What `instr live` and its viewers did, between `start` and `stop`."""

    directory: Path
    memory: list[dict[str, int]] = field(default_factory=list)
    """samples of the server"""
    heap: list[int] = field(default_factory=list)
    """bytes of the page, after a garbage collection; empty without Chromium"""
    frames: int = 0
    """of the viewer with the fewest"""
    lost: int = 0
    """frames, of all viewers"""
    metrics: dict[tuple[str, str], float] = field(default_factory=dict)
    """at the end, by name and kind of tokens"""
    problems: list[str] = field(default_factory=list)

    def start(self, log: Path) -> None:
        """Show a log that is, or will soon be, written."""
        end = time.monotonic() + PATIENCE_S
        while not log.exists():
            assert time.monotonic() < end
            time.sleep(0.1)
        self._errors = (self.directory / "live.txt").open("w")
        self._live = self._start("-m", "llamacpp_instr", "live", str(log), "--no-browser")
        assert self._live.stdout is not None
        address = self._live.stdout.readline().strip()
        self._metrics = self._live.stdout.readline().split()[-1]
        words = ("-m", "tests.kit.live_viewers", address, "--viewers", str(VIEWERS))
        self._viewers = self._start(*words)
        self._page = None
        if (chromium := ui_kit.chromium()) and (ui_kit.KIT / "node_modules").is_dir():
            self._page = self._start_page({"chromium": chromium, "address": address})
        self._over = threading.Event()
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()
        self._last_line = ""
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True,
        )  # fmt: skip

    def _start_page(self, request: dict[str, str]) -> subprocess.Popen[str]:
        page = subprocess.Popen(
            ["node", "heap.mjs"], cwd=ui_kit.KIT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True,
        )  # fmt: skip
        assert page.stdin is not None
        page.stdin.write(json.dumps(request) + "\n")
        page.stdin.flush()
        return page

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            with suppress(OSError):  # the end is checked below
                self.memory.append(memory_of(self._live.pid))

    def _listen(self) -> None:
        """The viewers print a line for each frame; only the last line is needed."""
        assert self._viewers.stdout is not None
        for line in self._viewers.stdout:
            self._last_line = line

    def stop(self) -> None:
        """The log is closed: wait for the viewers, and end the server."""
        try:
            self._viewers.wait(PATIENCE_S)
            self._listener.join()
            with urllib.request.urlopen(self._metrics, timeout=PATIENCE_S) as answer:
                self._read_metrics(answer.read().decode())
        finally:
            self._over.set()
            self._sampler.join()
            self._live.send_signal(signal.SIGINT)
            if (code := self._live.wait(PATIENCE_S)) != 0:
                self.problems.append(f"instr live ended with {code}")
            if self._page is not None:
                printed, _ = self._page.communicate(timeout=PATIENCE_S)
                self.heap = [int(line) for line in printed.split()]
            self._errors.close()
        each = json.loads(self._last_line)
        self.frames = min(len(frames) for frames in each)
        self.lost = sum(lost for frames in each for _, lost, *_ in frames)
        for frames in each:
            numbers = [number for number, *_ in frames]
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                self.problems.append("a viewer missed a frame")

    def _read_metrics(self, text: str) -> None:
        for family in text_string_to_metric_families(text):
            for of in family.samples:
                self.metrics[of.name, of.labels.get("kind", "")] = of.value

    def check(self, recording: Recording) -> None:
        """Compare what was shown with the log."""
        for name, expected in (
            (("llamacpp_instr_steps_total", ""), recording.steps),
            (("llamacpp_instr_tokens_total", "output"), recording.sampled),
        ):
            if (shown := self.metrics.get(name)) != expected:
                self.problems.append(f"{name} is {shown}; the log has {expected}")
