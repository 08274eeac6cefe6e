"""Compares `instr bench` with llama-bench: tokens per second of the same tests, interleaved.

    python -m benchmarks.bench [--model FILE] [--threads 2] [--prompt 256] [--tokens 64]

Each of the --pairs is two processes, which warm up and measure once. llama-bench is built from the
same source and records nothing, so the ratio contains what recording costs.
"""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks.harness import INSTR, arguments, median_ratio, scratch
from tests.kit.llama_programs import programs
from tests.kit.native_kit import DEMO


def main() -> None:
    options = arguments(__doc__, model=str(DEMO), threads=2, prompt=256, tokens=64, pairs=12)
    words = ("-p", options.prompt, "-n", options.tokens, "--threads", options.threads)
    rates: dict[tuple[str, bool], list[float]] = defaultdict(list)
    with scratch() as folder:
        for i in range(options.pairs):
            for is_ours in (True, False) if i % 2 else (False, True):
                measure = instr_bench if is_ours else llama_bench
                for test, rate in measure(options.model, folder / str(i), *words).items():
                    rates[test, is_ours].append(rate)
    print("| test | llama-bench, tokens/s | instr bench, tokens/s | ratio [95 % interval] |")
    print("|---|---:|---:|---|")
    for test in dict.fromkeys(test for test, _ in rates):
        ours, theirs = rates[test, True], rates[test, False]
        medians = f"{np.median(theirs):.1f} | {np.median(ours):.1f}"
        print(f"| {test} | {medians} | {median_ratio(ours, theirs)} |")


def instr_bench(model: str, logs: Path, *words: object) -> dict[str, float]:
    """Tokens per second of each test."""
    report, *_ = json.loads(
        output_of(*INSTR, "bench", model, *words, "--rounds", 1, "--logs", logs, "--json")
    )
    return {row["test"]: row["tokens_per_s"] for row in report["rows"]}


def llama_bench(model: str, _logs: Path, *words: object) -> dict[str, float]:
    """The same, measured by llama-bench."""
    program = programs() / "llama-bench"
    tests = json.loads(output_of(program, "-m", model, *words, "-r", 1, "-o", "json"))
    names = ((of, f"pp{of['n_prompt']}" if of["n_prompt"] else f"tg{of['n_gen']}") for of in tests)
    return {name: of["avg_ts"] for of, name in names}


def output_of(*words: object) -> str:
    return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
