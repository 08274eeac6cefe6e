"""Models beside the one that they were made from, on text that was not used to choose: a recipe
beside llama.cpp's own types of about its size, or all of these types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.lab.quality.divergence import CacheTypes, Divergence, Estimate, Floats
from llamacpp_instr.lab.quality.logits import DEFAULT_CTX, OutputOptions, compare_outputs
from llamacpp_instr.lab.quantize.plan import QuantizationPlan
from llamacpp_instr.llama.generate import tokenize
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.recipe.measure import Calibration, cut_calibration

STANDARD = (
    "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "IQ4_XS", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K",
    "Q8_0",
)  # fmt: skip
"""llama.cpp's own types that a recipe is compared with"""

_OTHER_SEED = 1 << 20
"""far from those of the text that effects are measured on"""
_LEAST_CTX = 8
AT_ONCE = 10**9
"""bytes of candidates that are compared in one run"""
F16 = CacheTypes()
_PARTS = 1000
"""of the progress of a candidate"""


@dataclass(frozen=True)
class Verified:
    """A model on the text for verification."""

    name: str
    plan: QuantizationPlan
    outputs: Divergence
    kl: Floats
    """(tokens,) in nats"""
    predicted: float | None
    """the KL divergence predicted from its tensors' effects, in nats; None if some are unknown"""


def split_text(
    source: ModelFile, text: str | None, chunks: int, threads: int | None
) -> tuple[Calibration, Calibration]:
    """What effects are measured on, and what the result is verified on: the halves of a text, or
    two texts that the model writes. Raises `UsageError` for a text that is too short."""
    ctx = min(DEFAULT_CTX, source.trained_tokens or DEFAULT_CTX)
    if text is None:
        first = Calibration(None, ctx, chunks, threads)
        return first, replace(first, seed=_OTHER_SEED)
    middle = text.find(" ", len(text) // 2)
    halves = [text[:middle], text[middle:]] if middle > 0 else [text, ""]
    least = min(map(len, tokenize(source.path, halves, parse_special=False)))
    if least < 2 * _LEAST_CTX:
        raise UsageError(
            f"half of the text has {least} tokens; at least {2 * _LEAST_CTX} are needed, and a few"
            " thousand are good"
        )
    ctx = min(ctx, least // 2)
    first, second = (Calibration(half, ctx, chunks, threads) for half in halves)
    return first, second


def verify(
    source: ModelFile,
    candidates: Sequence[ModelFile],
    text: Calibration,
    on_progress: OnProgress,
    cache: CacheTypes = F16,
) -> tuple[Estimate, list[tuple[Divergence, Floats]]]:
    """The perplexity of the source, and the divergence of each candidate, with this cache, from the
    source with an f16 cache: its figures, and (tokens,) KL divergences in nats. As many candidates
    are in memory at a time as fit into AT_ONCE, at least one."""
    options = OutputOptions(ctx=text.ctx, threads=text.threads, costs=False)
    chunks = cut_calibration(source, text)
    found: list[tuple[Divergence, Floats]] = []
    while len(found) < len(candidates):
        part = [candidates[len(found)]]
        for candidate in candidates[len(found) + 1 :]:
            if sum(of.n_bytes for of in (*part, candidate)) > AT_ONCE:
                break
            part.append(candidate)

        def advance(n: int, total: int, done: int = len(found), of: int = len(part)) -> None:
            on_progress(round(n / total * of * _PARTS) + done * _PARTS, len(candidates) * _PARTS)

        caches = [] if cache == F16 else [F16, *[cache] * len(part)]
        outputs = compare_outputs([source, *part], chunks, options, advance, caches)
        found += zip(outputs.divergences, outputs.kl, strict=True)
    return outputs.perplexity, found


def difference(one: Floats, other: Floats) -> Estimate:
    """The mean of one's KL divergence less the other's on the same tokens, with its standard
    error."""
    d = one.astype(np.float64) - other
    return Estimate(float(d.mean()), float(d.std(ddof=1) / np.sqrt(len(d))))


def neighbours(plans: Sequence[QuantizationPlan], n_bytes: int) -> list[QuantizationPlan]:
    """The largest plan of at most `n_bytes`, and the smallest of more."""
    by_size = sorted(plans, key=lambda plan: plan.file_bytes)
    below = [plan for plan in by_size if plan.file_bytes <= n_bytes]
    above = [plan for plan in by_size if plan.file_bytes > n_bytes]
    return below[-1:] + above[:1]


def quantized(folder: Path, plan: QuantizationPlan) -> Path:
    """Where a model of this plan is written in a folder."""
    return folder / f"{plan.file_type}.gguf"
