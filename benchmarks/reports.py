"""CPU time and memory of the reports of a large log: `python -m benchmarks.reports [--mb 1000]`.

The log is that of tests/fixtures at `verbose`, two threads, with its decodes repeated. Each command
runs in a process of its own; its start is included.
"""

from __future__ import annotations

from benchmarks.harness import RECORDED, arguments, cost_of_instr, scratch, write_long_log

COMMANDS = ("summary LOG", "stats LOG", "requests LOG", "tree LOG", "page LOG -o PAGE")


def main() -> None:
    megabytes = arguments(__doc__, mb=1000).mb
    with scratch() as folder:
        files = {"LOG": folder / "long.log", "PAGE": folder / "long.html"}
        n_ops, _ = write_long_log(RECORDED, files["LOG"], megabytes * 10**6)
        print(f"{files['LOG'].stat().st_size / 1e6:,.0f} MB, {n_ops:,} kernels of thread 0")
        for command in COMMANDS:
            seconds, peak = cost_of_instr(*(files.get(word, word) for word in command.split()))
            print(f"{command:<20} {seconds:6.1f} CPU s {peak / 1e6:8,.0f} MB")


if __name__ == "__main__":
    main()
