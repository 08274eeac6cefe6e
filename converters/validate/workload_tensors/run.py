"""Runs the beginning of a recorded session again, and captures the tensors of its workloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.exports.flashinfer.workloads import Found, Workload
from llamacpp_instr.converters.validate.workload_tensors.arrays import Array
from llamacpp_instr.converters.validate.workload_tensors.follow import Capturer
from llamacpp_instr.debugger.api import debug
from llamacpp_instr.lab.weights.measure import WeightReader
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.log import LlamaLog
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import counted_steps
from llamacpp_instr.model.file import ModelFile

DECODES = 1


def capture(
    file: ModelFile,
    session: Session,
    found: Found,
    log: LlamaLog,
    keep: Callable[[Workload, dict[str, Array]], object],
    on_progress: OnProgress,
) -> None:
    """Computes a prefill of as many tokens as the first of the session, with the session's context
    and the beginning of its prompt, and a decode. `keep` gets each workload, which `found` has
    then, with its tensors; `on_progress` gets computes done and in total. Raises `UsageError` for a
    session without steps, and for a weight whose type has no conversion to numbers."""
    steps, _ = counted_steps(session)
    if not len(steps):
        raise UsageError(f"{session.path}: no step to run again")
    # the first is a decode if the prompt has one token
    first = int(np.argmax(steps["phase"] != "decode"))
    context = session.contexts[int(steps["ctx"][first])]
    n = int(steps["n_tokens"][first])
    options = ContextOptions(
        ctx=context.n_ctx, batch=max(n, context.n_batch), ubatch=context.n_ubatch,
        threads=context.n_threads, cache_type_k=context.type_k, cache_type_v=context.type_v,
        flash_attn="on" if context.flash_attn else "off",
    )  # fmt: skip
    reader = WeightReader(file)
    for of in file.weights:
        reader.check(of)

    def weight(name: str) -> Array:
        return np.concatenate(list(reader.pieces(file.by_name[name])))

    with LoadedModel(file.path, log) as model:
        tokens = _tokens(model, session, n)
        with (
            temporary_directory("instr-capture-") as folder,
            debug(folder / "session.log") as debugging,
            ModelContext(model, options) as made,
        ):
            debugging.debugger.followers.append(Capturer(found, weight, keep))
            made.decode(tokens)
            on_progress(1, DECODES + 1)
            if model.has_decoder and context.causal:
                for step in range(DECODES):
                    made.decode(tokens[-1:])
                    on_progress(step + 2, DECODES + 1)


def _tokens(model: LoadedModel, session: Session, n: int) -> list[int]:
    """The first `n` tokens of the recorded prompt, repeated if it is shorter; of logs without one,
    tokens of the vocabulary."""
    args: Any = session.start.args
    prompts = args.get("prompts") if isinstance(args, dict) else None
    text = prompts[0] if isinstance(prompts, list) and prompts else None
    tokens = list(model.tokenize(text)) if isinstance(text, str) and text else []
    if not tokens:
        tokens = [(7 * i + 3) % model.n_vocab for i in range(n)]
    return (tokens * -(-n // len(tokens)))[:n]
