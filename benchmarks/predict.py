"""How far predictions are from measurements, for models that the probe never saw.

    python -m benchmarks.predict [--machine machine.json] [--threads 1,2] [--neighbours 1] [--json]
    python -m benchmarks.predict --models model-F16.gguf --calibrate Q4_K_M

Each held-out model is quantized, recorded and predicted from the F16 file alone: random ones, or
the files that --models names. --neighbours lets this many processes compute meanwhile; without
them, a recording that other processes disturbed is repeated. With --calibrate, the record of that
type scales the predictions of the others, which come a second time. Printed are median absolute
errors of decodes, of prefills, and of each kind of op with more than 1 % of the time, with 95 %
intervals; beside them those of a plain roofline: the larger of FLOPs over the fastest kernel's
rate, and of bytes over the bandwidth. --json also has every step: its measured median with a 95 %
interval, and its prediction. Intervals of medians are those of scipy's `quantile_test`, which
assumes no distribution. Run it when the machine is idle, right after `instr probe`. Steps of
several threads are listed separately as moved if a barrier no longer takes as long as in the
probe, because the host of a virtual machine has put its CPUs elsewhere.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from scipy.stats import quantile_test

from benchmarks.diff_noise import neighbours
from benchmarks.harness import arguments, scratch
from llamacpp_instr.base.machine import drop_cached
from llamacpp_instr.converters.analyses.clock import compute_machine
from llamacpp_instr.lab.quantize.plan import QuantizeOptions
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.log.graph.kernels import plan_kernels
from llamacpp_instr.log.session import Session, load_session
from llamacpp_instr.log.steps import counted_steps
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.prediction.calibrate import calibrated
from llamacpp_instr.prediction.fit import Floats, Sample, samples
from llamacpp_instr.prediction.model import kernel_model
from llamacpp_instr.prediction.probe.file import Probe, read_probe
from llamacpp_instr.prediction.recorded import (
    Run,
    Shape,
    barriers_of,
    has_moved,
    record_runs,
    write_random_layers,
)
from llamacpp_instr.prediction.steps import PlannedStep, planned_steps, write_retyped
from llamacpp_instr.recording.memory.plan import UbatchShape

SHAPES = {
    "100 M": (Shape(768, 2048, 12, 4, 16000), 10),
    "1 B of 3 layers": (Shape(2048, 8192, 32, 8, 16000), 3),
    "experts": (Shape(768, 1024, 12, 4, 8000, experts=6, used=2), 5),
    "gemma": (Shape(640, 2048, 4, 1, 65536, window=512, head=256), 9),
}
TYPES = ("F16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0")
RUNS = (
    Run(1, 25, past=16), Run(1, 15, past=512), Run(1, 11, past=2048), Run(8, 7, past=16),
    Run(128, 5), Run(512, 4),
)  # fmt: skip
TRIES = 3
CALIBRATED, MOVED = ", calibrated", ", moved"
FEW = 0.01
"""of the time of a step; kinds of op with less do not count"""


Row = dict[str, str | int | float]
Errors = dict[str, list[tuple[float, float]]]
"""relative errors of predictions and of the roofline, by what they are of"""


def main() -> None:
    args = arguments(
        __doc__, machine=None, threads="1,2", types=",".join(TYPES), models="", calibrate="",
        neighbours=0, json=False,
    )  # fmt: skip
    probe = read_probe(args.machine)
    errors: Errors = defaultdict(list)
    rows: list[Row] = []
    counts = [int(of) for of in args.threads.split(",")]
    with scratch() as folder:
        for model, source in held_out(folder, args.models):
            done = [
                of
                for name in args.types.split(",")
                for of in record(folder, source, name, counts, args.neighbours)
            ]
            for threads in counts:
                some = [of for of in done if of.threads == threads]
                used = {"": probe}
                if args.calibrate:
                    used[CALIBRATED] = by_log(probe, some, args.calibrate)
                for how, recorded in product(used, some):
                    if recorded.type == args.calibrate:
                        continue
                    for row in compared(recorded, used[how], threads, how, errors):
                        rows.append({"model": model, "type": recorded.type, "how": how, **row})
                        print(*map(_short, rows[-1].values()), file=sys.stderr, flush=True)
    medians: dict[str, Any] = {}
    for what, pairs in sorted(errors.items()):
        of, roofline = np.transpose(pairs)
        medians[what] = {
            "steps": len(of),
            "median_error": float(np.median(np.abs(of))),
            "interval": interval(np.abs(of)),
            "bias": float(np.median(of)),
            "roofline": float(np.median(np.abs(roofline))),
        }
    of_label: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        of_label["predicted" + MOVED * bool(row["moved"]) + str(row["how"])].append(row)
    within = {label: coverage(of) for label, of in of_label.items()}
    if args.json:
        print(json.dumps({"rows": rows, "medians": medians, "within_interval": within}, indent=1))
        return
    print(
        f"{'what':36} {'steps':>6} {'error':>8} {'95 % interval':>17} {'bias':>8} {'roofline':>9}"
    )
    for what, of in medians.items():
        low, high = of["interval"]
        print(
            f"{what:36} {of['steps']:6} {of['median_error']:8.1%} {low:8.1%} {high:8.1%}"
            f" {of['bias']:+8.1%} {of['roofline']:9.1%}"
        )
    for how, covered in within.items():
        medians_in, single_in = covered["medians"], covered["single"]
        print(
            f"{how}: within the 95 % interval are {medians_in:.0%} of the medians of steps,"
            f" {single_in:.0%} of {covered['steps']} single ones"
        )


def coverage(rows: list[Row]) -> dict[str, float]:
    """The shares of the medians, and of the single steps, within the intervals."""
    error, spread, single, steps = np.array(
        [(of["error"], of["spread"], of["within"], of["steps"]) for of in rows], float
    ).T
    inside = np.abs(np.log1p(error)) < 1.96 * spread
    return {
        "medians": float(inside.mean()), "single": float(single @ steps / steps.sum()),
        "steps": int(steps.sum()),
    }  # fmt: skip


def interval(values: Floats) -> tuple[float, float]:
    """The 95 % interval of a median, at most from the least to the largest value."""
    found = quantile_test(values, p=0.5).confidence_interval(0.95)
    low, high = (float(end) for end in (found.low, found.high))
    return (
        low if np.isfinite(low) else float(values.min()),
        high if np.isfinite(high) else float(values.max()),
    )


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def held_out(folder: Path, chosen: str) -> Iterator[tuple[str, Path]]:
    """Name and F16 file of each model."""
    names = chosen.split(",") if chosen else list(SHAPES)
    for name in names:
        if name not in SHAPES:
            yield Path(name).name, Path(name)
            continue
        shape, layers = SHAPES[name]
        path = folder / f"{name.replace(' ', '-')}.gguf"
        write_random_layers(path, shape, ["F16"] * layers)
        yield name, path
        path.unlink()


@dataclass(frozen=True)
class Recorded:
    """The runs of a model in a file type, and the file from which they are predicted."""

    type: str
    threads: int
    model: ModelFile
    session: Session
    """of the file that was really quantized"""
    barriers: dict[int, float]
    """`barriers_of` the threads after the recording"""


def record(
    folder: Path, path: Path, file_type: str, counts: Sequence[int], busy: int
) -> Iterator[Recorded]:
    """For each number of threads, beside `busy` busy processes. The file that is predicted has no
    weights; both files are removed afterwards. Without neighbours, what other processes disturbed
    is recorded again, at most TRIES times in total."""
    source, real = load_model_file(path), folder / "quantized.gguf"
    retyped = folder / f"retyped-{file_type}"
    retyped.mkdir(exist_ok=True)
    with Quantizer(source, QuantizeOptions()) as quantizer:
        plan = quantizer.plan(file_type)
        predicted = write_retyped(source, plan, retyped)
        if file_type == "F16":
            shutil.copy(path, real)
        else:
            quantizer.write([plan], [real], force=True)
    drop_cached(real)
    log = folder / "measured.log"
    for threads in counts:
        for _ in range(1 if busy else TRIES):
            with neighbours(busy):
                record_runs(real, log, threads, RUNS)
            session = load_session(log)
            machine = compute_machine(session, counted_steps(session)[0])
            if machine is None or not machine.is_disturbed or busy:
                break
            print(path.name, file_type, machine.sentence(), file=sys.stderr)
        yield Recorded(file_type, threads, predicted, session, barriers_of([threads]))
    real.unlink()


def by_log(probe: Probe, done: list[Recorded], by: str) -> Probe:
    (session,) = (of.session for of in done if of.type == by)
    model, factors = calibrated(kernel_model(probe, 1), session)
    print(by, factors, file=sys.stderr)
    return msgspec.structs.replace(probe, kernel_model=model)


def compared(of: Recorded, probe: Probe, threads: int, how: str, errors: Errors) -> Iterator[Row]:
    then = {barrier.threads: barrier.ns for barrier in probe.barriers}
    moved = has_moved(then, of.barriers)
    how = MOVED * moved + how
    for sample in samples(of.session):
        # not the filling of a cache
        if len(sample.steps) >= 2 and sample.tokens in {run.tokens for run in RUNS}:
            yield {**compare(sample, of.model, probe, threads, how, errors), "moved": moved}


def compare(
    sample: Sample, model: ModelFile, probe: Probe, threads: int, how: str, errors: Errors
) -> Row:
    shape = UbatchShape(sample.tokens, sample.past)
    (planned,) = planned_steps(model, ContextOptions(), [shape])
    predicted = planned.predict(probe, threads)
    ns, error = predicted.total()
    roofs = roofline(planned, probe, threads)
    kind = "decode" if sample.tokens == 1 else f"prefill of {sample.tokens}"
    of_step = ns / sample.step_ns - 1, float(roofs.sum()) / sample.step_ns - 1
    errors[f"{kind}, {threads} threads{how}"].append(of_step)
    measured: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    label = [name.split(" ")[0] for name in plan_kernels(planned.graph, planned.plan).label]
    assert len(label) == len(sample.ns)
    for name, *times in zip(label, sample.ns, predicted.ns, roofs, strict=True):
        for i, time in enumerate(times):
            measured[name][i] += float(time)
    for name, (real, guess, roof) in measured.items():
        if real > FEW * sample.ns.sum():
            errors[f"op {name}{how}"].append((guess / real - 1, roof / real - 1))
    low, high = interval(sample.steps)
    return {
        "threads": threads, "tokens": sample.tokens, "past": sample.past,
        "measured_us": sample.step_ns / 1e3, "predicted_us": ns / 1e3,
        "error": of_step[0], "spread": error / ns, "steps": len(sample.steps),
        "within": float(np.mean(np.abs(np.log(sample.steps / ns)) < 1.96 * error / ns)),
        "low_us": low / 1e3, "high_us": high / 1e3,
    }  # fmt: skip


def roofline(planned: PlannedStep, probe: Probe, threads: int) -> np.ndarray:
    """The larger of FLOPs over the fastest kernel, and bytes over the bandwidth, in ns."""
    kernels = plan_kernels(planned.graph, planned.plan)
    bandwidth = probe.bandwidth_of(threads, float(kernels.bytes.sum())).bytes_per_second
    peak = probe.fastest_kernel(threads).flops_per_second
    return np.maximum(kernels.flops / peak, kernels.bytes / bandwidth) * 1e9


if __name__ == "__main__":
    main()
