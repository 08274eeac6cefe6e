"""Runs tokens through a context: a prompt and its continuation, or an embedding.

No function here needs a tokenizer or gives a context more tokens than it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.llama.engine import ModelContext
from llamacpp_instr.llama.sampling import Sampler

Finish = Literal["end", "length", "context"]
"""Why generation stopped: the model ended it, `n` tokens were generated, the context is full."""


def generate(
    context: ModelContext,
    prompt: Sequence[int],
    sampler: Sampler,
    n: int,
    emit: Callable[[int], None],
    stop_at_end: bool = True,
) -> Finish:
    """Compute `prompt`, then up to `n` tokens; call `emit` with each, and return why it stopped.

    The model's end-of-generation token is not emitted. It stops the generation unless
    `stop_at_end` is False.
    """
    check_prompt(context, prompt)
    used = prefill(context, prompt)
    for count in range(1, n + 1):
        token = sampler.sample()
        if stop_at_end and context.model.is_end(token):
            return "end"
        emit(token)
        if count == n:
            break
        if used == context.size:
            return "context"
        context.decode([token])
        used += 1
    return "length"


def embed(context: ModelContext, prompt: Sequence[int]) -> list[float]:
    """The pooled embedding of `prompt`: as many values as the model's width, not normalized."""
    check_prompt(context, prompt)
    context.clear()
    if context.model.has_encoder:
        context.encode(prompt)
    else:
        context.decode(prompt)
    values = context.embedding(len(prompt))
    if values is None:
        raise UsageError(f"{context.model.path}: the model returns no embeddings")
    return values


def check_prompt(context: ModelContext, prompt: Sequence[int]) -> None:
    """Raise `UsageError` for a prompt that the context cannot take."""
    if not prompt:
        raise UsageError(
            "the prompt is empty and the model adds no BOS token, so there is nothing to compute; "
            "give some text"
        )
    if len(prompt) > context.size:
        raise UsageError(
            f"the prompt has {counted(len(prompt), 'token')}, the context holds {context.size}; "
            "make the context larger"
        )
    if context.takes_whole_prompts and len(prompt) > context.n_batch:
        raise UsageError(
            f"the prompt has {len(prompt):,} tokens, but this model computes a prompt in one "
            f"batch, here of at most {context.n_batch}; make n_batch and n_ubatch larger"
        )


def prefill(context: ModelContext, prompt: Sequence[int]) -> int:
    """Compute the prompt; return how many tokens are then in the decoder's cache."""
    if context.model.has_encoder:
        context.encode(prompt)
        prompt = [context.model.start_token]
    step = context.n_batch
    for start in range(0, len(prompt), step):
        context.decode(prompt[start : start + step])
    return len(prompt)
