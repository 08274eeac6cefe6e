"""What a log says of the machine and of page faults is what the kernel counts around it."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import read_events
from tests.kit.native_kit import DEMO, ROOT
from tests.kit.programs import run_python

pytestmark = pytest.mark.native
Counted = tuple[list[Any], list[float], Path]
"""the kernel's counters, load averages, the log"""
# Reads the kernel's counters before and after the session begins, before its last step and after it
# ends. Between, threads compete for one CPU, sleep, and touch new memory; they live until the end,
# for the counts of a thread go with it.
COUNTED = """
import hashlib, json, mmap, os, resource, sys, threading, time
from pathlib import Path
from tests.kit.decoder import Decoder
import llamacpp_instr

model, log, cold = sys.argv[1:]
decoder = Decoder(model)
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])

def threads():
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}

def counted(without=frozenset()):
    lines = Path("/proc/stat").read_text().splitlines()
    names = "user nice system idle iowait irq softirq steal".split()
    times = dict(zip(names, map(int, lines[0].split()[1:])))
    delays = {
        thread: int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
        for thread in threads() - without
    }
    return {
        "usage": list(resource.getrusage(resource.RUSAGE_SELF)),
        "busy": sum(times[name] for name in ("user", "nice", "system", "irq", "softirq")),
        "steal": times["steal"], "delay": sum(delays.values()), "t": time.monotonic_ns(),
    }

loads = []
def look():
    loads.append(float(Path("/proc/loadavg").read_text().split()[0]))

spin, done = threading.Event(), threading.Event()
def compete():
    spin.wait()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)  # without Python's lock
    spun.acquire()
    done.wait()

spun = threading.Semaphore(3)
others = [threading.Thread(target=compete) for _ in range(3)]
for other in others: other.start()
file = open(cold, "rb")
pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
pages.madvise(mmap.MADV_RANDOM)
os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

own = threads()
look()
counts = [counted()]
with llamacpp_instr.record(log, level="minimal"):
    counts.append(counted(threads() - own))
    recorders = threads() - own
    touched = mmap.mmap(-1, 32 << 20)
    for at in range(0, len(touched), mmap.PAGESIZE): touched[at] = 1
    cold_bytes = sum(pages[at] for at in range(0, len(pages), mmap.PAGESIZE))
    counts.append(counted(recorders))  # before the first step
    decoder.decode({0: [1]})
    counts.append(counted(recorders))
    spin.set()
    for _ in range(200): time.sleep(0.001)
    while spun._value: time.sleep(0.01)
    decoder.generate(8, 8)
    look()
    counts.append(counted(recorders))  # before the last step
    decoder.decode({0: [1]})
counts.append(counted(recorders))
look()
done.set()
print(json.dumps([counts, loads]))
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    folder = tmp_path_factory.mktemp("machine")
    with (folder / "cold").open("wb") as cold:
        cold.write(bytes(1 << 20))
        os.fsync(cold.fileno())  # only then the kernel can forget its pages
    done = run_python(COUNTED, DEMO, folder / "a.log", folder / "cold", cwd=ROOT, check=True)
    counts, loads = json.loads(done.stdout)
    for count in counts:
        count["usage"] = resource.struct_rusage(count["usage"])
    return counts, loads, folder / "a.log"


def test_the_machine_is_what_the_kernel_counts(counted: Counted) -> None:
    counts, loads, log = counted
    machine = read_events(log, "machine")
    before, begun, *_, last, after = counts
    tick = 10**9 // os.sysconf("SC_CLK_TCK")

    def between(key: str, of: Any, slack: int = 0) -> None:
        """The sum in the log is at least what passed inside the session, and at most around it."""
        recorded = sum(event[key] for event in machine)
        least, most = of(last) - of(begun), of(after) - of(before)
        assert least - slack <= recorded <= most + slack, (key, least, recorded, most)

    microsecond = 1000
    between("cpu", lambda c: round((c["usage"].ru_utime + c["usage"].ru_stime) * 1e9), microsecond)
    between("nvcsw", lambda c: c["usage"].ru_nvcsw)
    between("nivcsw", lambda c: c["usage"].ru_nivcsw)
    between("delay", lambda c: c["delay"])
    between("busy", lambda c: c["busy"] * tick)
    between("steal", lambda c: c["steal"] * tick)
    between("dur", lambda c: c["t"])
    assert sum(event["delay"] for event in machine) > 0
    ends = [event["t"] for event in machine]
    assert last["t"] <= ends[-1] <= after["t"]
    starts = [event["t"] - event["dur"] for event in machine]
    assert before["t"] <= starts[0] <= begun["t"]
    assert starts[1:] == ends[:-1], "each begins where the previous one ended"
    assert all(min(loads) <= event["load"] <= max(loads) for event in machine)
    assert all(event["running"] >= 0 for event in machine)


def test_page_faults_are_what_the_kernel_counts(counted: Counted) -> None:
    """The first step has those since the session began."""
    counts, _, log = counted
    before, begun, touched, stepped, *_ = counts
    first = read_events(log, "step_end")[0]
    for key in ("minflt", "majflt"):
        least = getattr(touched["usage"], f"ru_{key}") - getattr(begun["usage"], f"ru_{key}")
        most = getattr(stepped["usage"], f"ru_{key}") - getattr(before["usage"], f"ru_{key}")
        assert least <= first[key] <= most, key
    assert first["minflt"] >= (32 << 20) // resource.getpagesize()


# each model that goes makes the recorder write at once
FREED = """
import sys
import llama_cpp, llamacpp_instr
with llamacpp_instr.record(sys.argv[2]):
    for _ in range(20):
        llm = llama_cpp.Llama(sys.argv[1], n_ctx=32, verbose=False)
        llm.eval([1, 2, 3])
        llm.close()
"""


def test_the_machine_is_looked_at_ten_times_a_second_however_often_is_written(
    tmp_path: Path,
) -> None:
    run_python(FREED, DEMO, tmp_path / "s.log", check=True)
    looks = read_events(tmp_path / "s.log", "machine")
    assert all(look["dur"] > 90_000_000 for look in looks[:-1])
    assert len(looks) > 1
