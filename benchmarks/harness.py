"""What the benchmarks share: arguments, ratios of pairs, processes of their own, long logs."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from llamacpp_instr.prediction.recorded import Shape

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "tests" / "fixtures" / "demo-verbose.log"
"""a session of two threads"""
INSTR = (sys.executable, "-m", "llamacpp_instr")
RESAMPLES = 4000
MODEL_100M = Shape(768, 2048, 12, 4, 16000), ["F16"] * 12
"""a Llama with 100.1 million parameters, and the types of its layers"""
MODEL_EXPERTS = Shape(512, 768, 8, 4, 8000, experts=16, used=4), ["F16"] * 5
"""the same for a Mixtral with 106.5 million"""

T = TypeVar("T")


def arguments(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """The options of the command line, which `doc` describes. A default of None stands for text, a
    tuple has the choices, and a list takes several values of the type of its first."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        option = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(option, choices=default, default=default[0])
        elif isinstance(default, list):
            parser.add_argument(option, nargs="+", type=type(default[0]), default=default)
        else:
            kind = str if default is None else type(default)
            parser.add_argument(option, type=kind, default=default, metavar=kind.__name__.upper())
    return parser.parse_args()


# --- ratios ---


@dataclass(frozen=True)
class Ratio:
    """A median ratio and its 95 % interval (percentile bootstrap over the pairs)."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.4f} [{self.low:.4f}, {self.high:.4f}] over {self.pairs} pairs"


def median_ratio(measured: npt.ArrayLike, peer: npt.ArrayLike) -> Ratio:
    """The median of the ratios of interleaved measurements: `measured[i] / peer[i]`."""
    ratios = np.divide(measured, peer)
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (RESAMPLES, len(ratios))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))


def cpu_in_turns(
    pairs: int, **functions: Callable[[], object]
) -> dict[str, npt.NDArray[np.float64]]:
    """CPU seconds of all threads of this process for each call; the functions take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(pairs):
        for name, function in functions.items():
            begin = time.process_time()
            function()
            seconds[name].append(time.process_time() - begin)
    return {name: np.array(values) for name, values in seconds.items()}


def median_and_late(values: npt.ArrayLike, unit: str = "ms") -> str:
    """`median 1.2 ms, 99th percentile 3.4 ms`."""
    median, late = np.percentile(values, [50, 99])
    return f"median {median:.1f} {unit}, 99th percentile {late:.1f} {unit}"


# --- processes ---


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory that is removed at the end."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def instr(*words: object) -> None:
    """Run `instr` with these words."""
    subprocess.run([*INSTR, *map(str, words)], check=True, capture_output=True, text=True)


def record_demo(log: Path, n: int = 32, *words: object) -> None:
    """Record the demo model writing `n` tokens."""
    instr("run", "demo", "--prompt", "Once upon a time", "-n", n, "--force", "--log", log, *words)


_COST = """
import json, os, sys
from llamacpp_instr.__main__ import main
try:
    main()
except SystemExit as leaving:
    assert not leaving.code, leaving.code
from benchmarks.harness import peak_bytes
print(json.dumps([sum(os.times()[:4]), peak_bytes()]), file=sys.stderr)
"""


def cost_of_instr(*words: object) -> tuple[float, int]:
    """CPU seconds and the peak memory in bytes of `instr` with these words, its start included."""
    done = subprocess.run(
        [sys.executable, "-c", _COST, *map(str, words)], cwd=ROOT, check=True, env=_kept_modules(),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    seconds, peak = json.loads(done.stderr.splitlines()[-1])
    return seconds, peak


def _kept_modules() -> dict[str, str]:
    """An environment in which Python keeps what it compiles, as in a user's."""
    return {name: of for name, of in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def in_own_process(function: Callable[..., T], *values: object) -> T:
    """What a function of a module returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *values).result()


def peak_bytes() -> int:
    """The peak of this process's resident memory. `ru_maxrss` would also count its parent's."""
    return _status("self", "VmHWM")


def own_bytes(pid: object = "self") -> int:
    """Memory of a process without that of mapped files, which the system can drop; 0 if it has
    ended."""
    try:
        return _status(pid, "RssAnon")
    except (OSError, IndexError):
        return 0


def _status(pid: object, key: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) * 1024


@contextmanager
def sampled(read: Callable[[], int]) -> Iterator[list[int]]:
    """What `read` returns while the block runs, 50 times a second; at least once."""
    values = [read()]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.02):
            values.append(read())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield values
    finally:
        over.set()
        thread.join()


# --- logs ---

_NUMBERS = re.compile(r'"(t|step|compute|index)":(\d+)')
_REPEATED = {"step_begin", "kv", "compute", "layers", "ops", "step_end", "token"}
_LEFT_OUT = {"machine"}
"""counts since the session began, ten times a second"""


def write_long_log(real: Path, out: Path, n_bytes: float = 0, n_ops: float = 0) -> tuple[int, int]:
    """Write `real` to `out`, and repeat the steps after its last graph at later times until there
    are `n_bytes` bytes, and `n_ops` ops of all threads. Returns the number of ops of thread 0, and
    of all threads."""
    lines = real.read_text(encoding="utf-8").splitlines(keepends=True)
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    built = max(i for i, e in enumerate(events) if e["event"] in ("graph", "plan"))
    first = next(i for i in range(built, len(events)) if events[i]["event"] == "step_begin")
    last = max(i for i, e in enumerate(events) if e["event"] in ("step_end", "token"))
    repeated = [i for i in range(first, last + 1) if events[i]["event"] not in _LEFT_OUT]
    block = [events[i] for i in repeated]
    others = {e["event"] for e in block} - _REPEATED
    assert not others, f"the steps have events that cannot be repeated: {others}"
    # a copy begins where the previous one ended
    ahead = {}
    for key, gap in (("step", 1), ("compute", 1), ("index", 1), ("t", 100_000)):
        found = [e[key] for e in block if key in e]
        ahead[key] = max(found, default=0) - min(found, default=0) + gap
    text = "".join(lines[i] for i in repeated)
    counts = np.array(_count_ops(events[: last + 1]))
    with out.open("w", encoding="utf-8") as file:
        size = file.write("".join(lines[: last + 1]))
        copy = 0
        while size < n_bytes or counts[1] < n_ops:
            copy += 1
            counts += _count_ops(block)

            def later(found: re.Match[str]) -> str:
                return f'"{found[1]}":{int(found[2]) + copy * ahead[found[1]]}'  # noqa: B023

            size += file.write(_NUMBERS.sub(later, text))
    return int(counts[0]), int(counts[1])


def _count_ops(events: list[dict[str, Any]]) -> tuple[int, int]:
    ops = [(len(e["dur"]), not e.get("thread")) for e in events if e["event"] == "ops"]
    return sum(n for n, is_first in ops if is_first), sum(n for n, _ in ops)
