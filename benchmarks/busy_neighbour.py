"""Measures how often a recording names a busy neighbour, with one and without.

    python -m benchmarks.busy_neighbour [--recordings 20]

Records the demo model idle and with as many busy processes as there are CPUs, alternately.
"""

from __future__ import annotations

import os

from benchmarks.diff_noise import neighbours
from benchmarks.harness import arguments, record_demo, scratch
from llamacpp_instr.converters.analyses.clock import compute_machine
from llamacpp_instr.converters.analyses.findings import Facts, find_causes
from llamacpp_instr.log.session import load_session
from llamacpp_instr.log.steps import Account, counted_steps


def main() -> None:
    n = arguments(__doc__, recordings=20).recordings
    shares: dict[bool, list[float]] = {False: [], True: []}
    named = {False: 0, True: 0}
    with scratch() as folder:
        log = folder / "session.log"
        for busy in [False, True] * n:
            with neighbours(busy * (os.cpu_count() or 1)):
                record_demo(log, 64, "--repeat", 5, "--threads", 2)
            session = load_session(log)
            steps, _ = counted_steps(session)
            machine = compute_machine(session, steps)
            assert machine is not None
            shares[busy].append(machine.share)
            found = find_causes(Facts(Account(session, steps)))
            named[busy] += "disturbed-machine" in {finding.rule for finding in found}
    for busy, what in ((False, "idle"), (True, "busy")):
        print(
            f"{what}: named in {named[busy]} of {n}; share of the CPU time that was taken:"
            f" {100 * min(shares[busy]):.1f} % to {100 * max(shares[busy]):.1f} %"
        )


if __name__ == "__main__":
    main()
