"""Recipes beside llama.cpp's own types of equal size, and beside mixtures that are chosen by the
errors of the weights alone: `python -m benchmarks.recipe MODEL`.

For each own type, both ways to choose get at most as many bytes. Choosing by errors is what
llama.cpp's proposal 15550 does: the least sum of squared errors of the weights, weighted by the
importance matrix if there is one. Effects are measured on one text, and all models on another
one. The last column says how well effects add up: predicted / measured KL divergence.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import progress_bar
from llamacpp_instr.lab.quantize.plan import QuantizationPlan
from llamacpp_instr.lab.quantize.runner import Quantizer
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.recipe.measure import Measured, measure
from llamacpp_instr.recipe.report import Z95
from llamacpp_instr.recipe.run import (
    Limits,
    choose_types,
    make_again,
    options_for,
    predicted_kl,
    standard_plans,
)
from llamacpp_instr.recipe.verify import difference, split_text, verify

SIZES = ("Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a model in F16")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    source = load_model_file(given.model)
    options = options_for(source, given.imatrix, given.threads)
    text = given.text.read_text() if given.text else None
    first, second = split_text(source, text, given.chunks, given.threads)
    with progress_bar("Errors") as on_errors, progress_bar("Effects") as on_effects:
        measured = measure(source, options, first, on_errors, on_effects)
    with Quantizer(source, options) as quantizer, temporary_directory("instr-bench-") as folder:
        plans = standard_plans(quantizer)
        print(
            f"effects add up to {sum(measured.effects.values()) / measured.whole:.3f} of the whole"
        )
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
                low, high = (apart.value + side * Z95 * apart.error for side in (-1, 1))
                predicted = predicted_kl(measured, plan)
                value = divergence.kl.value
                print(
                    f"{name:9} {who:8} {file.file_size:>11,} {value:10.6f} {predicted or 0:10.6f}  "
                    f"{apart.value:9.6f} [{low:9.6f}, {high:9.6f}]  {(predicted or 0) / value:5.2f}"
                )


def by_errors(measured: Measured) -> Measured:
    """The same tensors, with the error of the weights in place of the KL divergence."""
    choices = {
        name: [replace(of, kl=of.error) for of in choices]
        for name, choices in measured.choices.items()
    }
    return replace(measured, choices=choices)


if __name__ == "__main__":
    main()
