"""`python -m tests.load`: a server under load for minutes, and a table of the results."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from tests.kit.native_kit import ROOT
from tests.load.hold import Held, growth, hold
from tests.load.live import VIEWERS, LiveView

MIB = 2**20
MAX_GROWTH = 4 * MIB
"""maximum growth of a recorded server in the second half, beyond the plain one's"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rotate", type=int, default=16_000_000, metavar="BYTES")
    parser.add_argument("--directory", type=Path, default=ROOT / "out" / "load")
    parser.add_argument("--live", action="store_true", help="show the recorded server meanwhile")
    options = parser.parse_args()
    shutil.rmtree(options.directory, ignore_errors=True)
    options.directory.mkdir(parents=True)
    held = hold(
        options.directory, 60 * options.minutes, options.clients, options.rotate,
        lambda line: print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True),
        options.live,
    )  # fmt: skip
    more = held.growth("recorded") - held.growth("plain")
    if more > MAX_GROWTH:
        held.problems.append(f"the recorded server grew by {more:,} bytes more than the plain")
    if held.live:
        for what, grown in (("server", held.growth("live")), ("page", growth(held.live.heap))):
            if grown > MAX_GROWTH:
                held.problems.append(f"the {what} of instr live grew by {grown:,} bytes")
    print(table(held))
    for problem in held.problems:
        print(f"WRONG: {problem}")
    print(f"log and output of the servers: {options.directory}")
    return 1 if held.problems else 0


def table(held: Held) -> str:
    log, matched = held.recording, held.matched
    assert log is not None
    assert matched is not None
    prompts = sum(outcome.prompt_tokens * n for outcome, n in held.outcomes.items())
    decodes = sum(generation.decodes for generation in log.generations)
    of_left = sum(len(generation.ids) for generation in matched.left)
    rows = {
        "minutes": f"{held.seconds / 60:.1f}",
        "clients": str(held.clients),
        "requests": f"{held.requests:,} to each server",
        "  refused": f"{held.refused:,}",
        "  left by their client": f"{held.hung_up:,}",
        "  answered otherwise": f"{held.differing:,}",
        "tokens of prompts, by usage": f"{prompts:,}",
        "  evaluated or kept, by the log": f"{log.evaluated - decodes + log.kept:,}",
        "tokens of answers, by usage": f"{matched.by_usage:,}",
        "  sampled, by the log": f"{log.sampled - of_left:,}; {of_left:,} for those who left",
        "steps": f"{log.steps:,}",
        "parts": f"{len(log.parts)}, the largest of {max(log.n_bytes):,} bytes",
        "  answers cut in two": f"{log.cut}",
        "bytes": f"{sum(log.n_bytes):,}",
        "events": f"{log.events.total():,}",
        "  dropped": f"{log.dropped}",
    }
    for what in ("Private_Dirty", "Rss"):
        values = (
            f"{name} {held.growth(name, what) / MIB:+.2f} of {held.last(name, what) / MIB:.1f}"
            for name in ("recorded", "plain")
        )
        rows[f"{what} in the second half, MiB"] = ", ".join(values)
    if held.live:
        rows |= live_rows(held, held.live)
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def live_rows(held: Held, live: LiveView) -> dict[str, str]:
    heap = f"{growth(live.heap) / MIB:+.2f} of {live.heap[-1] / MIB:.1f}"
    return {
        "live view": f"{VIEWERS} viewers and a page" if live.heap else f"{VIEWERS} viewers",
        "  frames of each viewer": f"{live.frames:,}; {live.lost} lost",
        "  steps that it counted": f"{live.metrics['llamacpp_instr_steps_total']:,.0f}",
        "  Private_Dirty in the second half, MiB": (
            f"{held.growth('live') / MIB:+.2f} of {held.last('live') / MIB:.1f}"
        ),
        "  heap of the page in the second half, MiB": heap if live.heap else "not measured",
    }


if __name__ == "__main__":
    sys.exit(main())
