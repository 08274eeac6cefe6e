"""Runs a model and checks its ops, its logits and its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.validate.follow import Checked, Checker
from llamacpp_instr.converters.validate.node import Array, error_of
from llamacpp_instr.converters.validate.prompt import check_only_decodes, prompt_tokens
from llamacpp_instr.converters.validate.whole import FirstInputs, Whole, compare_logits
from llamacpp_instr.debugger.api import debug
from llamacpp_instr.debugger.collected import CollectedLogits
from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.log import LlamaLog
from llamacpp_instr.model.file import ModelFile

OF_LOGITS = 2e-3
"""the error that test-backend-ops allows for a whole model (`test_llama`)"""


@dataclass(frozen=True)
class Validation:
    """What was found."""

    ops: list[Checked]
    cache: list[float]
    """of each decode: the error of its logits against those of one pass over all tokens, which
    reads nothing from the cache"""
    whole: Whole | None = None
    """the prompt's logits against those of the whole graph in ONNX Runtime"""


def validate_model(
    file: ModelFile,
    prompt: str | None,
    decodes: int,
    options: ContextOptions,
    log: LlamaLog,
    on_progress: OnProgress,
) -> Validation:
    """Computes a prompt, or tokens of the vocabulary, and `decodes` tokens more, and checks
    every op. `on_progress` gets computes done and in total. Raises `UsageError` for a model that
    has no logits, and for a weight whose type has no conversion to numbers."""
    reader = WeightReader(file)
    for weight in file.weights:
        reader.check(weight)

    def numbers(name: str) -> Array:
        return np.concatenate(list(reader.pieces(file.by_name[name])))

    found: list[Checked] = []
    with LoadedModel(file.path, log) as model:
        check_only_decodes(model)
        tokens = prompt_tokens(model, prompt)
        n = len(tokens) + decodes
        options = replace(options, ctx=options.ctx or n, batch=n, ubatch=n)
        collected = CollectedLogits()
        first = FirstInputs()
        with (
            temporary_directory("instr-validate-") as folder,
            debug(folder / "session.log") as debugging,
            ModelContext(model, options) as made,
        ):
            debugging.debugger.followers += [first, Checker(numbers, found.append)]
            debugging.debugger.witnesses.append(collected)
            for step in range(decodes + 1):
                made.decode(tokens[-1:] if step else tokens)
                tokens.append(int(np.nan_to_num(collected.rows[-1]).argmax()))
                on_progress(step + 1, decodes + 3)
        one_pass = _one_pass(model, options, tokens[:-1])
    on_progress(decodes + 2, decodes + 3)
    cache = [
        error_of(row, one_pass[len(one_pass) - decodes + i])
        for i, row in enumerate(collected.rows[1:])
    ]
    whole = compare_logits(file, first, collected.rows[0])
    on_progress(decodes + 3, decodes + 3)
    return Validation(found, cache, whole)


def _one_pass(model: LoadedModel, options: ContextOptions, tokens: Sequence[int]) -> list[Array]:
    """The logits of every token, computed at once."""
    with ModelContext(model, options) as context:
        context.decode(tokens, all_logits=True)
        api: Any = context.api
        row: Callable[[int], Any] = lambda i: api.llama_get_logits_ith(context.handle, i)  # noqa: E731
        return [np.ctypeslib.as_array(row(i), (model.n_vocab,)).copy() for i in range(len(tokens))]
