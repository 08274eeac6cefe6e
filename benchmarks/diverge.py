"""What `instr diverge` costs, and how well the shares of weights predict mixtures.

    python -m benchmarks.diverge cost [FOLDER]
    python -m benchmarks.diverge shares A.gguf B.gguf

`cost` writes two models of the shape of Llama-3.2-1B with random weights into FOLDER (F16 and
Q8_0, 3 GB), and measures alternately a run of both on 512 tokens that the first wrote, and their
comparison on the same tokens. Memory is the process's own (RssAnon), sampled 50 times a second.
`shares` measures the shares of the weights, and then 20 random mixtures, each with half of the
weights of B.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.harness import own_bytes, sampled, scratch
from llamacpp_instr.diverge.run import Comparison, DivergeOptions, Pair, opened_pair, that_differ
from llamacpp_instr.diverge.shares import measure_shares
from llamacpp_instr.llama.engine import ModelContext
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.prediction.recorded import Shape, write_random_layers

LLAMA_1B = Shape(2048, 8192, 32, 8, 32000)
LAYERS = 16
TOKENS = 512
ROUNDS = 3
MIXTURES = 20
MIB = 2**20


def main() -> None:
    command, *names = sys.argv[1:] or [""]
    if command == "cost" and len(names) <= 1:
        with ExitStack() as stack:
            measure_cost(Path(names[0]) if names else stack.enter_context(scratch()))
    elif command == "shares" and len(names) == 2:
        measure_mixtures(*names)
    else:
        sys.exit(__doc__)


def measure_cost(folder: Path) -> None:
    """Print time and memory of the two runs and of the comparison."""
    folder.mkdir(exist_ok=True)
    files = [
        load_model_file(write_random_layers(folder / f"1b-{kind}.gguf", LLAMA_1B, [kind] * LAYERS))
        for kind in ("F16", "Q8_0")
    ]
    options = DivergeOptions(tokens=TOKENS)
    ratios: dict[str, list[float]] = {"wall": [], "cpu": []}
    with opened_pair(files[0], files[1], None, options) as pair:
        _run_both(pair)  # reads the files
        for _ in range(ROUNDS):
            wall, cpu, own = _measured(lambda: _run_both(pair))
            pair.comparison = Comparison([str(file.path) for file in files], options.memory)
            both_wall, both_cpu, both_own = _measured(lambda: pair.compare(lambda *_: None))
            ratios["wall"].append(both_wall / wall)
            ratios["cpu"].append(both_cpu / cpu)
            print(
                f"two runs {wall:.1f} s ({cpu:.1f} s CPU); compared {both_wall:.1f} s"
                f" ({both_cpu:.1f} s CPU); {(both_own - own) / MIB:.0f} MiB more than the runs, of"
                f" {options.memory // MIB} allowed",
                flush=True,
            )
    for key, values in ratios.items():
        print(f"{key}: {statistics.median(values):.2f} times the two runs (median)")


def measure_mixtures(a: str, b: str) -> None:
    """Print the shares' sum, and how predictions and measurements of mixtures agree."""
    files = load_model_file(a), load_model_file(b)
    rng = random.Random(1)
    with opened_pair(*files, None, DivergeOptions(tokens=256)) as pair:
        pair.compare(lambda *_: None)
        names = that_differ(*files, [weight.name for weight in pair.comparison.weights])
        with pair.mixtures() as kl_of:
            shares = measure_shares(kl_of, names, lambda *_: None)
            mixtures = [rng.sample(names, len(names) // 2) for _ in range(MIXTURES)]
            real = [kl_of(mixture) for mixture in mixtures]
    predicted = [shares.predicted(mixture) for mixture in mixtures]
    ranks = [np.argsort(np.argsort(values)) for values in (real, predicted)]
    print(
        f"{len(names)} weights, {shares.exchanges} exchanges; all exchanged {shares.whole:.6f}"
        f" nats, sum of the shares {shares.sum:.6f} ({100 * shares.sum / shares.whole:.0f} %)"
    )
    print(
        f"{MIXTURES} mixtures: rank correlation {np.corrcoef(*ranks)[0, 1]:.3f},"
        f" correlation {np.corrcoef(real, predicted)[0, 1]:.3f}"
    )


def _run_both(pair: Pair) -> None:
    with ExitStack() as stack:
        for model in pair.models:
            context = stack.enter_context(ModelContext(model, pair.choice))
            for chunk in pair.chunks:
                context.decode(chunk, all_logits=True)


def _measured(work: Callable[[], object]) -> tuple[float, float, int]:
    """Seconds, CPU seconds, and the peak of the process's own memory."""
    begun, cpu = time.monotonic(), time.process_time()
    with sampled(own_bytes) as sizes:
        work()
    return time.monotonic() - begun, time.process_time() - cpu, max(sizes)


if __name__ == "__main__":
    main()
