"""Writes docs/how-to/choose-a-quantization.md and its picture: `make quantization`.

It calls the functions behind `instr quantize`, `quality` and `compare` on the demo model. The
speeds are those of this machine.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llamacpp_instr.converters.analyses.compare import Candidate, Pair
from llamacpp_instr.converters.analyses.memory import stored_in_file
from llamacpp_instr.converters.analyses.noise import Ratio
from llamacpp_instr.lab.quality.divergence import Outputs
from llamacpp_instr.lab.quality.logits import OutputOptions, compare_outputs
from llamacpp_instr.lab.weights.figures import Sums
from llamacpp_instr.lab.weights.measure import compute_weight_errors
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.log.session import load_session
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.report.charts import Point, scatter_size_error
from llamacpp_instr.run.compare import run_trials
from llamacpp_instr.run.session import RunOptions

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "how-to" / "choose-a-quantization.md"
PICTURE = ROOT / "docs" / "images" / "quantization.png"

FILE_TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M", "Q2_K")
CHUNKS = 64
ROUNDS = 8


@dataclass(frozen=True)
class Line:
    """The measurements of one file type."""

    file_type: str
    file: ModelFile
    sqnr_db: float
    decode: Ratio | None
    """decode time divided by the reference's"""


def main() -> None:
    reference = load_model_file("demo")
    with tempfile.TemporaryDirectory() as name:
        lines = measure(reference, Path(name))
        files = [reference, *(line.file for line in lines)]
        print(f"perplexity and KL divergence over {CHUNKS} chunks", file=sys.stderr)
        outputs = compare_outputs(files, None, OutputOptions(chunks=CHUNKS))
        PAGE.write_text(page(table(reference, lines, outputs), outputs.n_scored), encoding="utf-8")
        points = [
            Point(line.file_type, line.file.file_size / 2**20, of.kl.value, of.kl.half_interval)
            for line, of in zip(lines, outputs.divergences, strict=True)
        ]
        title, error = "What quantization costs the demo model", "mean KL divergence from F16, nats"
        PICTURE.write_bytes(scatter_size_error(title, "file, MiB", error, points).png())
    print(f"{PAGE.relative_to(ROOT)}, {PICTURE.relative_to(ROOT)}")


def measure(reference: ModelFile, directory: Path) -> list[Line]:
    """Quantize to every file type, interleave runs of all of them, and compare the weights."""
    context = ContextOptions(threads=1)
    options = RunOptions("", ["Once upon a time"], n=64, repeat=3, context=context)
    source = directory / "demo-F16.gguf"
    shutil.copyfile(reference.path, source)  # so that it takes its turn with the others
    types = ["F16", *FILE_TYPES]
    notice = partial(print, file=sys.stderr)
    trials = run_trials(load_model_file(source), types, directory, options, ROUNDS, notice)
    lines = []
    base: Candidate | None = None
    for trial in trials:
        file = load_model_file(trial.model)
        sessions = [load_session(log) for log in trial.logs]
        side = Candidate(trial.name, stored_in_file(file), sessions=sessions)
        if base is None:
            base = side
            continue
        errors = compute_weight_errors(reference, file)
        sums = sum((error.sums for error in errors), Sums())
        lines.append(Line(trial.name, file, sums.sqnr_db, Pair(base, side).step_ratio("decode")))
    return lines


def table(reference: ModelFile, lines: Sequence[Line], outputs: Outputs) -> str:
    """The table of the page."""
    ppl = outputs.perplexity
    rows = [
        "| file type | file, MiB | bits/weight | SQNR, dB | perplexity | KL divergence | same top "
        "| decode, speed against F16 |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        f"| F16 | {mib(reference)} | {bits(reference)} | | {ppl.value:.4f} ± {ppl.error:.4f} "
        "| | | 1 |",
    ]
    for line, of in zip(lines, outputs.divergences, strict=True):
        ppl = of.perplexity
        rows.append(
            f"| {line.file_type} | {mib(line.file)} | {bits(line.file)} | {line.sqnr_db:.1f} "
            f"| {ppl.value:.4f} ± {ppl.error:.4f} | {of.kl.value:.6f} ± {of.kl.error:.6f} "
            f"| {100 * of.same_top.value:.2f} % | {speed(line.decode)} |"
        )
    return "\n".join(rows)


def mib(file: ModelFile) -> str:
    return f"{file.file_size / 2**20:.2f}"


def bits(file: ModelFile) -> str:
    return f"{8 * file.n_bytes / file.n_elements:.2f}"


def speed(ratio: Ratio | None) -> str:
    """`1.31 [1.25, 1.37]`: the inverse of a ratio of times."""
    if ratio is None or not ratio.value or not ratio.low or not ratio.high:
        return ""
    return f"{1 / ratio.value:.2f} [{1 / ratio.high:.2f}, {1 / ratio.low:.2f}]"


def page(rows: str, n_tokens: int) -> str:
    return f"""\
# Choose a quantization

<!-- Written by `make quantization`. Do not edit: change tools/quantization_page.py. -->

The demo model ships in F16. This table compares seven quantized file types with it:

{rows}

![KL divergence of each file type over its size](../images/quantization.png)

- **file, bits/weight**: `instr quantize demo --types {",".join(FILE_TYPES)}` writes the files, and
  `instr inspect FILE` shows how many bits each tensor has.
- **SQNR**: the signal-to-quantization-noise ratio of the weights, from
  `instr quality demo FILE --only weights`. 6 dB more is half the error.
- **perplexity, KL divergence, same top**: `instr quality demo FILE… --chunks {CHUNKS}` scores
  {n_tokens:,} tokens of a text that the F16 model writes itself. The KL divergence says how far the
  probabilities of the next token are from those of F16, in nats; it is the mean over these
  tokens. *Same top* is how often both models rank the same token first. ± is one standard error.
- **decode**: `instr compare --types F16,{",".join(FILE_TYPES)} demo --threads 1
  --rounds {ROUNDS}` interleaves runs of the types. The column has the median speed of a decode with
  its 95 % interval, on the machine that made this page, which was not idle. The demo model fits
  into the processor's cache, so the gains of a large model differ. The kernels of a type matter as
  much as its bytes: rows of Q4_K are interleaved for this processor, those of Q5_K are not.

## How to read it

- Perplexity hardly changes until the KL divergence has grown by orders of magnitude, because the
  model finds the text easy. The standard error of a perplexity describes the text, not the
  difference between two models. The difference is known more precisely; `instr quality` shows it.
- Each bit less per weight costs about 6 dB of SQNR, whatever the type. A good type is above that
  line, a poor one below it.
- A small model suffers more than a large one at the same bits. `instr recipe model-F16.gguf`
  prints such a table for yours, and finds a mixture of types for it
  ([Choose the type of each tensor](make-a-recipe.md)). To compare files of your own:

```sh
instr compare --types Q8_0,Q4_K_M model-F16.gguf -o comparison.html
instr quality model-F16.gguf model-Q8_0.gguf model-Q4_K_M.gguf --text your-text.txt
```

Logs of your own program can also be compared:
`instr compare a.gguf b.gguf --log a-*.log --log b-*.log`. Each `--log` takes all logs of one model:
several runs of it, or the parts of a rotated log.
"""


if __name__ == "__main__":
    main()
