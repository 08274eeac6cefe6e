"""Runs a reference and its candidates over chunks of a text, and compares their logits. The text is
given, or written by the reference.

Invariant: only the logits of one slice of a chunk are in memory, once for each model, in
llama.cpp's own buffer; none are stored. All chunks have the same length, and each is computed with
an empty cache. Input that would abort ggml is refused before the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.lab.quality.caches import ROUNDS, options_of, plan_caches, time_in_turns
from llamacpp_instr.lab.quality.divergence import (
    AtPositions,
    CacheCost,
    CacheTypes,
    Outputs,
    Scores,
    round_of,
)
from llamacpp_instr.llama.crashes import last_words
from llamacpp_instr.llama.engine import ComputeError, ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.generate import Sampler, Sampling, tokenize
from llamacpp_instr.llama.log import Interrupt, LlamaFailed, LlamaLog, captured
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.model.header import read_array
from llamacpp_instr.recording.memory.plan import check_memory

WRITTEN_AT_ONCE = 8
"""chunks that a model writes in parallel. A decode of eight tokens takes little more time than one
of a single token, and eight chunks take as much memory as an ordinary context"""

_PADDING = 256
DEFAULT_CTX = 512
"""tokens of a chunk, as in llama-perplexity"""
WRITTEN_CHUNKS = 16
"""default number of chunks that the reference writes"""

DEFAULT_SEED = 1

_LOGITS_BYTES = 64 * 2**20
_MIN_CTX = 8
_SHORTEST = 32
"""the fewest positions of a range, if the context has more"""
# ggml uses other kernels below 64 rows, which changes the fourth digit of a perplexity
_ROWS, _MAX_BATCH = 64, 512
_TOKENS = "tokenizer.ggml.tokens"


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

    Raises UsageError for a text of fewer than two chunks.
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
        chunks = [[_first_token(context.model)] for _ in seeds]
        context.clear()
        with ExitStack() as stack:
            samplers = [
                stack.enter_context(Sampler(context, Sampling(temp=1.0, seed=of))) for of in seeds
            ]
            for position in range(context.n_per_chunk - 1):
                _decode_one_each(context, [chunk[-1] for chunk in chunks], position)
                for i, chunk in enumerate(chunks):
                    chunk.append(samplers[i].sample(i))
                on_tokens(count)
        yield from chunks


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


@dataclass(frozen=True)
class OutputOptions:
    """Options of the comparison; None selects the default."""

    ctx: int | None = None
    """tokens of a chunk"""
    chunks: int | None = None
    batch: int | None = None
    """tokens computed at once; their logits are in memory"""
    threads: int | None = None
    seed: int = DEFAULT_SEED
    """of the text that the reference writes"""
    costs: bool = True
    """with caches, also measure what each costs, and the positions of the first half"""

    def check(self) -> None:
        """Raise `UsageError` for a value that is wrong for every model."""
        if self.ctx is not None and self.ctx < _MIN_CTX:
            raise UsageError(f"--ctx is {self.ctx}; it must be at least {_MIN_CTX}")
        ContextOptions(ctx=self.ctx, batch=self.batch, threads=self.threads).check()
        Sampling(temp=1.0, seed=self.seed).check()


def check_comparison(files: Sequence[ModelFile], options: OutputOptions) -> None:
    """Raise `UsageError` for errors that can be found without loading a model."""
    options.check()
    for file in files:
        file.check_has_weights("; it computes nothing")
        _check_same_vocabulary(files[0], file)


def compare_outputs(
    files: Sequence[ModelFile],
    text: str | Sequence[Sequence[int]] | None,
    options: OutputOptions,
    on_progress: OnProgress = lambda *_: None,
    caches: Sequence[CacheTypes] = (),
) -> Outputs:
    """The perplexity of a reference (the first of `files`) and of candidates (the others), and the
    divergence of each candidate on `text`, on chunks of `options.ctx` tokens, or on text that the
    reference writes if `text` is None.

    As in llama-perplexity, the predictions of the second half of each chunk are scored. With
    `caches`, one for each of `files`, also those of the first half, but only by position; and the
    memory and the time of each cache are measured, unless `options.costs` is false.
    `on_progress` gets (tokens computed, tokens to compute). Raises `UsageError` for models or
    options that cannot be compared, `NativeError` without the patched library, `InstrError` if a
    model fails.
    """
    check_comparison(files, options)
    costs = bool(caches) and options.costs
    every = [options_of(types) for types in caches or [CacheTypes()] * len(files)]
    for file, of in zip(files, every, strict=True):
        check_memory(file, replace(of, ctx=options.ctx, threads=options.threads))
    tokens = None
    if isinstance(text, str):
        [tokens] = tokenize(files[0].path, [text], parse_special=False)
    # each is loaded once, also for several caches
    distinct = list({file.path: file for file in files}.values())
    with opened_models(distinct) as (models, log), ExitStack() as stack:
        reference = models[0]
        ctx = options.ctx or _default_ctx(reference)
        batch = options.batch or _choose_batch(reference.n_vocab)
        # report errors of the text before memory is allocated
        cut = None if text is None or isinstance(text, str) else text
        if tokens is not None:
            cut = cut_chunks(reference, tokens, ctx, options.chunks)
        n_bytes = plan_caches(files, caches, ctx) if caches else []
        model_of = {model.path: model for model in models}
        contexts = [
            stack.enter_context(
                ModelContext(
                    model_of[file.path],
                    replace(of, ctx=ctx, batch=batch, ubatch=batch, threads=options.threads),
                )
            )
            for file, of in zip(files, every, strict=True)
        ]
        check_contexts(contexts)
        n_chunks = (options.chunks or WRITTEN_CHUNKS) if cut is None else len(cut)
        n_written = n_chunks * (ctx - 1) if cut is None else 0
        n_timed = ROUNDS * (ctx - round_of(ctx).depth) if costs else 0
        done, total = 0, (n_chunks * ctx + n_timed) * len(files) + n_written

        def advance(n: int) -> None:
            nonlocal done
            done += n
            on_progress(done, total)

        scores = Scores([str(file.path) for file in files])
        chunks: Iterator[Sequence[int]]
        if cut is None:
            at_once = ContextOptions(ctx=ctx, threads=options.threads)
            writer = stack.enter_context(WritingContext(reference, at_once))
            chunks = write_chunks(writer, n_chunks, options.seed, advance)
        else:
            chunks = iter(cut)
        log.release()  # the input is valid
        first = 0 if costs else ctx // 2
        for chunk in chunks:
            _score(chunk, contexts, batch, scores, first, advance)
        times = time_in_turns(contexts, chunk, batch, advance) if costs else []
    n_positions = ctx - 1 - first
    second_half = scores.within(n_positions, slice(ctx // 2 - first, None))
    return Outputs(
        perplexity=second_half.perplexity(),
        divergences=second_half.divergences(),
        n_scored=second_half.n_tokens,
        n_chunks=n_chunks,
        ctx=ctx,
        seed=options.seed if cut is None else None,
        kl=second_half.kl(),
        caches=list(map(CacheCost, caches, n_bytes, times)) if costs else [],
        by_position=[
            AtPositions(
                positions.start + 1,
                positions.stop,
                part.n_tokens,
                part.perplexity(),
                part.divergences(),
            )
            for positions in (_doubling(ctx) if costs else ())
            for part in [scores.within(n_positions, positions)]
        ],
    )


def _doubling(ctx: int) -> list[slice]:
    """The positions of a chunk that are scored, in ranges; each is about as long as all before it
    together, and the last is the half that llama-perplexity scores."""
    ends = [ctx - 1, ctx // 2]
    while ends[-1] >= 2 * _SHORTEST:
        ends.append(ends[-1] // 2)
    return [slice(begin, end) for begin, end in pairwise([0, *reversed(ends)])]


def _score(
    chunk: Sequence[int],
    contexts: Sequence[ModelContext],
    batch: int,
    scores: Scores,
    first: int,
    advance: Callable[[int], None],
) -> None:
    """Compute a chunk in all contexts, and score the token after each position from `first`, which
    is 0 or its middle. What precedes it only provides the context."""
    for context in contexts:
        context.clear()
    for start, end in _slices(len(chunk), batch):
        for context in contexts:
            context.decode(chunk[start:end], all_logits=start >= first)
            advance(end - start)
        if start >= first:
            next_tokens = np.array(chunk[start + 1 : end + 1], np.intp)
            logits = [logits_of(context, len(next_tokens)) for context in contexts]
            scores.add(logits, next_tokens)


def _slices(ctx: int, batch: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive slices of a chunk; none crosses its middle.

    The last position is computed although it is not scored: without it the number of rows would be
    odd, ggml's kernels would divide the rows differently, and the perplexity of a quantized model
    would differ from llama-perplexity's in the fourth digit.
    """
    for begin, end in ((0, ctx // 2), (ctx // 2, ctx)):
        for start in range(begin, end, batch):
            yield start, min(start + batch, end)


def logits_of(context: ModelContext, n: int) -> NDArray[np.float32]:
    """(n, vocabulary): logits of the first `n` tokens computed last, valid until the next call."""
    pointer = context.api.llama_get_logits(context.handle)
    if not pointer:
        raise InstrError(f"{context.model.path}: the model returns no logits")
    return np.ctypeslib.as_array(
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (n, context.model.n_vocab)
    )


@contextmanager
def opened_models(files: Sequence[ModelFile]) -> Iterator[tuple[list[LoadedModel], LlamaLog]]:
    """The loaded models and llama.cpp's log. Raises `UsageError` for a model that does not predict
    the next token. Inside, Ctrl-C ends a compute, and a crash is reported in one line."""
    interrupt = Interrupt()
    with interrupt.watching(), captured(interrupt) as log, ExitStack() as stack:
        stack.enter_context(last_words(lambda: (", ".join(str(f.path) for f in files), 1)))
        yield [_check_predicts(stack.enter_context(LoadedModel(f.path, log))) for f in files], log


def _check_predicts(model: LoadedModel) -> LoadedModel:
    if model.is_diffusion:
        raise UsageError(f"{model.path} is a diffusion model: it does not predict the next token")
    if model.has_encoder or not model.has_decoder:
        raise UsageError(
            f"{model.path} has an encoder; only models that predict the next token from the "
            "previous ones can be compared by their outputs"
            " (`instr quality --only weights` compares weights)"
        )
    return model


def _check_same_vocabulary(reference: ModelFile, candidate: ModelFile) -> None:
    """Raise `UsageError` unless every token has the same text in both models; otherwise their
    probabilities cannot be compared."""
    ours, theirs = (file.arrays.get(_TOKENS) for file in (reference, candidate))
    if ours is None or theirs is None:
        return  # checked once the models are loaded
    what = f"{candidate.path} and {reference.path} have different vocabularies"
    if ours.count != theirs.count:
        raise UsageError(f"{what}: {theirs.count:,} and {ours.count:,} tokens")
    pairs = zip(
        read_array(reference.path, ours, ours.count),
        read_array(candidate.path, theirs, theirs.count),
        strict=True,
    )
    for i, (one, other) in enumerate(pairs):
        if one != other:
            raise UsageError(f"{what}: token {i} is {other!r} and {one!r}")


def check_contexts(contexts: Sequence[ModelContext]) -> None:
    """Raise `UsageError` unless all keep a cache and have vocabularies of the same size."""
    reference = contexts[0].model
    for context in contexts:
        model = context.model
        if not context.memory:
            raise UsageError(
                f"{model.path} is an encoder; it does not predict the next token"
                " (`instr quality --only weights` compares weights)"
            )
        if model.n_vocab != reference.n_vocab:
            raise UsageError(
                f"{model.path} and {reference.path} have different vocabularies: "
                f"{model.n_vocab:,} and {reference.n_vocab:,} tokens"
            )


def _default_ctx(model: LoadedModel) -> int:
    trained = model.n_positions or model.n_ctx_train or DEFAULT_CTX
    return max(min(DEFAULT_CTX, trained), _MIN_CTX)


def _choose_batch(n_vocab: int) -> int:
    """Tokens to compute at once, so that a model's logits take at most `_LOGITS_BYTES`."""
    return min(max(_LOGITS_BYTES // (4 * n_vocab) // _ROWS, 1) * _ROWS, _MAX_BATCH)
