"""The chunks of tokens that models are compared on: cut from a text, or written by a model.

Invariant: all chunks have the same length. Each is computed with an empty cache, so it begins with
the token that the model expects at the beginning of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama.engine import ComputeError, ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.log import LlamaFailed
from llamacpp_instr.llama.sampling import Sampler, Sampling

WRITTEN_AT_ONCE = 8
"""chunks that a model writes in parallel. A decode of eight tokens takes little more time than one
of a single token, and eight chunks take as much memory as an ordinary context"""

_PADDING = 256


class WritingContext(ModelContext):
    """A context in which a model writes up to WRITTEN_AT_ONCE chunks of `options.ctx` tokens."""

    def __enter__(self) -> WritingContext:
        return self

    def _params(self, options: ContextOptions, embed_tokens: int) -> Any:
        params = super()._params(options, embed_tokens)
        self.n_per_chunk = int(params.n_ctx)
        params.n_seq_max = params.n_batch = params.n_ubatch = WRITTEN_AT_ONCE
        # rounded up as llama.cpp does, which would otherwise print a warning
        params.n_ctx = -(-self.n_per_chunk // _PADDING) * _PADDING * WRITTEN_AT_ONCE
        return params


def cut_chunks(
    model: LoadedModel, tokens: Sequence[int], ctx: int, at_most: int | None = None
) -> list[list[int]]:
    """The complete chunks of `ctx` tokens of a text, cut as in llama-perplexity: a chunk's first
    token is replaced by the beginning-of-sequence token if the model expects one.

    Raises UsageError for a text of less than two chunks.
    """
    if len(tokens) < 2 * ctx:
        raise UsageError(
            f"the text has {len(tokens):,} tokens; at least {2 * ctx:,} are needed for chunks of "
            f"{ctx:,}: give a longer text, or a smaller --ctx"
        )
    ends = range(ctx, len(tokens) + 1, ctx)[:at_most]
    chunks = [list(tokens[end - ctx : end]) for end in ends]
    if model.adds_bos:
        for chunk in chunks:
            chunk[0] = _first_token(model)
    return chunks


def write_chunks(
    context: WritingContext, n: int, seed: int, on_tokens: Callable[[int], None]
) -> Iterator[list[int]]:
    """`n` chunks that a model writes from nothing at temperature 1. `on_tokens` gets the number of
    tokens newly computed.

    An end-of-text token is like any other token here: the model continues after it, and the text
    still has the model's own probabilities.
    """
    for start in range(0, n, WRITTEN_AT_ONCE):
        count = min(WRITTEN_AT_ONCE, n - start)
        # so that the seed of a chunk does not depend on the number of chunks
        seeds = [(seed + start + i) % (2**32 - 1) for i in range(count)]
        yield from _write(context, seeds, on_tokens)


def _write(
    context: WritingContext, seeds: Sequence[int], on_tokens: Callable[[int], None]
) -> list[list[int]]:
    chunks = [[_first_token(context.model)] for _ in seeds]
    context.clear()
    with ExitStack() as stack:
        samplers = [
            stack.enter_context(Sampler(context, Sampling(temp=1.0, seed=seed))) for seed in seeds
        ]
        for position in range(context.n_per_chunk - 1):
            _decode_one_each(context, [chunk[-1] for chunk in chunks], position)
            for i, chunk in enumerate(chunks):
                chunk.append(samplers[i].sample(i))
            on_tokens(len(chunks))
    return chunks


def _decode_one_each(context: ModelContext, tokens: Sequence[int], position: int) -> None:
    """Compute the next token of each sequence; all get logits."""
    api, model = context.api, context.model
    batch = api.llama_batch_init(len(tokens), 0, 1)
    try:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, i
        with model.log.trying(lambda why: ComputeError(f"{model.path}: decode failed: {why}")):
            if api.llama_decode(context.handle, batch) != 0:
                raise LlamaFailed
    finally:
        api.llama_batch_free(batch)


def _first_token(model: LoadedModel) -> int:
    """The first token of a text: BOS, or the token that separates texts if there is no BOS."""
    for token in (model.api.llama_vocab_bos(model.vocab), model.api.llama_vocab_eos(model.vocab)):
        if 0 <= token < model.n_vocab:
            return int(token)
    return 0
