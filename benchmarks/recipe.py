"""Recipes beside llama.cpp's own types of equal size, and beside mixtures that are chosen by the
errors of the weights alone: `python -m benchmarks.recipe MODEL… [--picture FILE.png]`.

For each own type, both ways to choose get at most the same number of bytes. Choosing by errors is
what llama.cpp's proposal 15550 does: the least sum of squared errors of the weights, weighted by
the importance matrix if there is one. Effects are measured on one text, and all models on another
one. The last column says how well effects add up: predicted / measured KL divergence, which
`--picture` draws. `--cost` instead compares the cost of a recipe with that of llama-perplexity on
as many chunks of the same text.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from benchmarks.harness import INSTR, ROOT, own_bytes, sampled, scratch
from llamacpp_instr.base.machine import usable_cpus
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import progress_bar
from llamacpp_instr.lab.quantize.plan import QuantizationPlan
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.recipe.measure import Measured, measure
from llamacpp_instr.recipe.run import (
    Limits,
    choose_types,
    make_again,
    options_for,
    predicted_kl,
    standard_plans,
)
from llamacpp_instr.recipe.verify import difference, split_text, verify
from llamacpp_instr.report.charts import Chart, color_of
from tests.kit.native_kit import unpatched_library

README = ROOT / "README.md"
SIZES = ("Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")


@dataclass(frozen=True)
class Pair:
    """A predicted and a measured KL divergence, in nats."""

    of: str
    """the model, and who chose its types"""
    predicted: float
    measured: float
    spread: float
    """half of the 95 % interval of the measured one"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a model in F16")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--picture", type=Path, help="a PNG file")
    parser.add_argument("--cost", action="store_true")
    given = parser.parse_args()
    if given.cost:
        for model in given.models:
            print_cost(load_model_file(model), given)
        return
    pairs = [pair for model in given.models for pair in compare(load_model_file(model), given)]
    if given.picture:
        title = "The KL divergence from F16 that effects predict, and the measured one"
        chart = Chart(title, lambda figure: draw_pairs(figure.subplots(), pairs))
        given.picture.write_bytes(chart.png())


def compare(source: ModelFile, given: argparse.Namespace) -> list[Pair]:
    """Prints the mixtures at each size; returns those with a prediction."""
    options = options_for(source, given.imatrix, given.threads)
    text = given.text.read_text() if given.text else None
    first, second = split_text(source, text, given.chunks, given.threads)
    with progress_bar("Errors") as on_errors, progress_bar("Effects") as on_effects:
        measured = measure(source, options, first, on_errors, on_effects)
    pairs = []
    with Quantizer(source, options) as quantizer, temporary_directory("instr-bench-") as folder:
        plans = standard_plans(quantizer)
        whole = sum(measured.effects.values()) / measured.whole
        print(f"{source.path.name}: effects add up to {whole:.3f} of the whole")
        print(
            "size      who        bytes         KL  predicted  less than own [95 %]   pred./meas."
        )
        for name in SIZES:
            [own] = [plan for plan in plans if plan.file_type == name]
            made: list[tuple[str, QuantizationPlan, ModelFile]] = []
            for who, of in (("own", None), ("effects", measured), ("errors", by_errors(measured))):
                path = folder / f"{name}-{who}.gguf"
                plan = own
                if of is None:
                    quantizer.write([own], [path])
                else:
                    recipe, _ = choose_types(of, plans, options, Limits(size=own.file_bytes))
                    plan = make_again(source, recipe, options, path, False)
                made.append((who, plan, load_model_file(path)))
            with progress_bar("Comparing") as on_progress:
                _, outputs = verify(source, [file for _, _, file in made], second, on_progress)
            for (who, plan, file), (divergence, kl) in zip(made, outputs, strict=True):
                apart = difference(outputs[0][1], kl)
                low, high = (apart.value + side * apart.half_interval for side in (-1, 1))
                predicted, value = predicted_kl(measured, plan) or 0.0, divergence.kl.value
                print(
                    f"{name:9} {who:8} {file.file_size:>11,} {value:10.6f} {predicted:10.6f}  "
                    f"{apart.value:9.6f} [{low:9.6f}, {high:9.6f}]  {predicted / value:5.2f}"
                )
                if predicted:
                    by = f"{source.path.stem}, {CHOSEN[who]}"
                    pairs.append(Pair(by, predicted, value, divergence.kl.half_interval))
    return pairs


CHOSEN = {"own": "llama.cpp's types", "effects": "recipes", "errors": "by errors alone"}


def draw_pairs(axes: Any, pairs: Sequence[Pair]) -> None:
    """Measured over predicted, with 95 % intervals, and a line where both are equal."""
    ends = [f(of.predicted for of in pairs) for f in (min, max)]
    axes.plot(ends, ends, color="gray", linewidth=1, label="equal")
    for number, name in enumerate(dict.fromkeys(of.of for of in pairs)):
        some = [of for of in pairs if of.of == name]
        axes.errorbar(
            [of.predicted for of in some], [of.measured for of in some],
            [of.spread for of in some], fmt="os^DvP"[number % 6], color=color_of(number),
            markersize=5, linewidth=1, label=name,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="predicted, nats", ylabel="measured, nats")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda nats, _: f"{nats:g}")
    axes.legend(frameon=False, fontsize="small")


def print_cost(source: ModelFile, given: argparse.Namespace) -> None:
    """CPU seconds of llama-perplexity over a text, and of a recipe that measures with it. The
    memory is that of all processes together, without mapped files."""
    threads = given.threads or usable_cpus()
    seconds = []
    with scratch() as folder:
        text = folder / "text.txt"
        text.write_text(given.text.read_text() if given.text else README.read_text())
        made = folder / "made.gguf"
        perplexity = unpatched_library() / "llama-perplexity"
        once = [perplexity, "-m", source.path, "-f", text, "-c", 512, "-t", threads]
        recipe = [*INSTR, "recipe", source.path, "--bpw", 4.8, "-o", made, "--text", text]
        recipe += ["--threads", threads]
        # nothing was measured before
        own = {**os.environ, "LLAMACPP_INSTR_CACHE": str(folder)}
        for what, words in (("llama-perplexity", once), ("recipe", recipe)):
            before = sum(os.times()[2:4])
            command = [*map(str, words), "--chunks", str(given.chunks)]
            with (
                subprocess.Popen(command, env=own, stdout=DEVNULL, stderr=DEVNULL) as process,
                sampled(partial(bytes_of_all, process.pid)) as sizes,
            ):
                assert process.wait() == 0
            seconds.append(sum(os.times()[2:4]) - before)
            print(f"{what:16} {seconds[-1]:8,.1f} CPU s {max(sizes) / 1e6:6,.0f} MB")
    print(f"{source.path.name}: a recipe takes {seconds[1] / seconds[0]:.1f} times as long")


def bytes_of_all(pid: int) -> int:
    """The own memory of a process and of those that it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        children = []
    return own_bytes(pid) + sum(bytes_of_all(int(child)) for child in children)


def by_errors(measured: Measured) -> Measured:
    """The same tensors, with the error of the weights in place of the KL divergence."""
    choices = {
        name: [replace(of, kl=of.error) for of in choices]
        for name, choices in measured.choices.items()
    }
    return replace(measured, choices=choices)


if __name__ == "__main__":
    main()
