"""Measures how often a recording names a busy neighbour, with one and without.

    python -m benchmarks.busy_neighbour [--recordings 20]

Records the demo model idle and with as many busy processes as there are CPUs, in turns.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.diff_noise import neighbours, record
from llamacpp_instr.converters.analyses.findings import find_causes
from llamacpp_instr.converters.analyses.findings.facts import gather_facts
from llamacpp_instr.converters.analyses.machine import compute_machine
from llamacpp_instr.log.session import load_session
from llamacpp_instr.log.steps import Account, counted_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recordings", type=int, default=20)
    n = parser.parse_args().recordings
    shares: dict[bool, list[float]] = {False: [], True: []}
    named = {False: 0, True: 0}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(n):
            for busy in (False, True):
                log = Path(name) / "session.log"
                with neighbours(busy):
                    record(log, repeat=5, threads=2)
                session = load_session(log)
                steps, _ = counted_steps(session)
                machine = compute_machine(session, steps)
                assert machine is not None
                shares[busy].append(machine.share)
                rules = {
                    finding.rule for finding in find_causes(gather_facts(Account(session, steps)))
                }
                named[busy] += "disturbed-machine" in rules
    for busy, what in ((False, "idle"), (True, "busy")):
        taken = sorted(shares[busy])
        print(
            f"{what}: named in {named[busy]} of {n}; share of the CPU time that was taken:"
            f" {100 * taken[0]:.1f} % to {100 * taken[-1]:.1f} %"
        )


if __name__ == "__main__":
    main()
