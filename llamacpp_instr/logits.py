"""Runs a reference and its candidates side by side over one text and compares their logits.

Invariant: only the logits of one slice of a chunk are ever in memory, once for each model, where
llama.cpp computed them; none is stored. What ggml would abort at is refused before it is called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .divergence import Outputs, Scores
from .engine import Context, ContextOptions, Model
from .errors import InstrError, UsageError
from .gguf_header import read_array
from .interrupt import Interrupt
from .llama_log import LlamaLog, captured
from .model_file import ModelFile
from .sampling import Sampler, Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_CTX = 512
"""Tokens of a chunk, as in llama-perplexity."""

WRITTEN_CHUNKS = 16
"""Chunks that the reference writes itself when nobody says how many."""

_LOGITS_BYTES = 64 * 2**20
_MIN_CTX = 8
# ggml's kernels take other ways below 64 rows, which changes the fourth digit of a perplexity
_ROWS, _MAX_BATCH = 64, 512
_TOKENS = "tokenizer.ggml.tokens"


@dataclass(frozen=True)
class OutputOptions:
    """What a user may choose about the comparison; None leaves it to us."""

    ctx: int | None = None
    """tokens of a chunk"""
    chunks: int | None = None
    batch: int | None = None
    """tokens computed at once: their logits are in memory"""
    threads: int | None = None
    seed: int = 1
    """of the text that the reference writes"""

    def check(self) -> None:
        """Raise `UsageError` for a value that no model could be run with."""
        if self.ctx is not None and self.ctx < _MIN_CTX:
            raise UsageError(f"--ctx is {self.ctx}; it must be at least {_MIN_CTX}")
        if self.chunks is not None and self.chunks < 1:
            raise UsageError(f"--chunks is {self.chunks}; it must be at least 1")
        ContextOptions(ctx=self.ctx, batch=self.batch, threads=self.threads).check()
        Sampling(temp=1.0, seed=self.seed).check()


def check_comparison(files: Sequence[ModelFile], options: OutputOptions) -> None:
    """Raise `UsageError` for what can be told to be wrong without loading a model."""
    options.check()
    for file in files:
        if not file.weights:
            raise UsageError(
                f"{file.path} holds only a vocabulary, no weights; it computes nothing"
            )
        _check_same_vocabulary(files[0], file)


def compare_outputs(
    files: Sequence[ModelFile],
    text: str | None,
    options: OutputOptions,
    on_progress: Callable[[int, int], None] | None = None,
) -> Outputs:
    """Perplexity of a reference, the first of `files`, and of candidates, the others, and how far
    each of these is from it on `text`, or on what the reference writes when that is None.

    The text is cut into chunks of `options.ctx` tokens, each computed on its own, with the
    beginning-of-sequence token first where the model wants it; scored are the predictions from
    the second half of each chunk, as in llama-perplexity. `on_progress` gets the tokens computed
    so far and those to compute. Raises `UsageError` for what cannot be compared, `NativeError`
    without the library, `InstrError` when a model fails.
    """
    check_comparison(files, options)
    interrupt = Interrupt()
    with interrupt.watching(), captured(interrupt) as log, ExitStack() as stack:
        models = [_open_model(stack, file, log) for file in files]
        chunks = _Text(models[0], text, options)
        batch = options.batch or _choose_batch(models[0].n_vocab)
        context_options = ContextOptions(
            ctx=chunks.ctx, batch=batch, ubatch=batch, threads=options.threads
        )
        contexts = [stack.enter_context(Context(model, context_options)) for model in models]
        _check_contexts(contexts)
        log.release()  # nothing is wrong with the input any more
        return _compare(contexts, chunks, batch, on_progress or (lambda _done, _total: None))


class _Text:
    """The chunks of a text: cut from one that was given, or written by the reference."""

    def __init__(self, model: Model, text: str | None, options: OutputOptions) -> None:
        self.ctx = options.ctx or _default_ctx(model)
        self.seed = options.seed if text is None else None
        self.first = _first_token(model)
        self.tokens: list[int] = []
        self.n_chunks = options.chunks or WRITTEN_CHUNKS
        if text is not None:
            self.tokens = model.tokenize(text, parse_special=False)
            self._check_length()
            whole = len(self.tokens) // self.ctx
            self.n_chunks = min(options.chunks or whole, whole)
        self.adds_bos = model.adds_bos

    @property
    def n_computed(self) -> int:
        """Tokens that the reference computes beside those of the chunks."""
        return self.n_chunks * (self.ctx - 1) if self.seed is not None else 0

    def chunks(self, context: Context, on_token: Callable[[], None]) -> Iterator[list[int]]:
        """The chunks, of `ctx` tokens each; `context` is the reference's, and is used."""
        for i in range(self.n_chunks):
            if self.seed is not None:
                # each chunk can be written again on its own
                sampling = Sampling(temp=1.0, seed=(self.seed + i) % (2**32 - 1))
                with Sampler(context, sampling) as sampler:
                    yield self._write(context, sampler, on_token)
                continue
            chunk = self.tokens[i * self.ctx : (i + 1) * self.ctx]
            yield [self.first, *chunk[1:]] if self.adds_bos else chunk

    def _write(self, context: Context, sampler: Sampler, on_token: Callable[[], None]) -> list[int]:
        """What the model writes from nothing. Its end of a text is a token as any other: what it
        writes after that has the probabilities that it says, too."""
        context.clear()
        chunk = [self.first]
        while len(chunk) < self.ctx:
            context.decode(chunk[-1:])
            chunk.append(sampler.sample())
            on_token()
        return chunk

    def _check_length(self) -> None:
        if len(self.tokens) < 2 * self.ctx:
            raise UsageError(
                f"the text has {len(self.tokens)} tokens; at least {2 * self.ctx} are needed for "
                f"chunks of {self.ctx}: give a longer text, or a smaller --ctx"
            )


def _compare(
    contexts: Sequence[Context],
    text: _Text,
    batch: int,
    on_progress: Callable[[int, int], None],
) -> Outputs:
    import numpy as np

    per_chunk = len(contexts) * text.ctx
    total = text.n_chunks * per_chunk + text.n_computed
    done = 0

    def advance(n: int = 1) -> None:
        nonlocal done
        done += n
        on_progress(done, total)

    names = [str(context.model.path) for context in contexts]
    scores = Scores(names)
    # before the middle of a chunk a prediction has too little to go by
    middle = text.ctx // 2
    for chunk in text.chunks(contexts[0], advance):
        for context in contexts:
            context.clear()
        for start, end in _slices(text.ctx, batch):
            scored = start >= middle
            for context in contexts:
                context.decode(chunk[start:end], all_logits=scored)
                advance(end - start)
            if scored:
                next_tokens = np.array(chunk[start + 1 : end + 1], np.intp)
                logits = [_logits(context, len(next_tokens)) for context in contexts]
                scores.add(logits, next_tokens)
    return Outputs(
        perplexity=scores.perplexity(),
        divergences=scores.divergences(),
        n_scored=text.n_chunks * (text.ctx - 1 - middle),
        n_chunks=text.n_chunks,
        ctx=text.ctx,
        seed=text.seed,
        logits_bytes=4 * contexts[0].model.n_vocab * min(batch, text.ctx - middle),
    )


def _slices(ctx: int, batch: int) -> Iterator[tuple[int, int]]:
    """A chunk's positions piece by piece: none lies on both sides of its middle.

    The last one is computed although it is not scored, as what follows it is not known: ggml
    computes a number of rows that its kernels divide otherwise than the odd one left, and a
    quantized model then differs from llama-perplexity in the fourth digit.
    """
    for begin, end in ((0, ctx // 2), (ctx // 2, ctx)):
        for start in range(begin, end, batch):
            yield start, min(start + batch, end)


def _logits(context: Context, n: int) -> NDArray[np.float32]:
    """The logits of the first `n` tokens of those computed last, good until the next are."""
    import numpy as np

    pointer = context.api.llama_get_logits(context.handle)
    if not pointer:
        raise InstrError(f"{context.model.path}: the model gives no logits")
    return np.ctypeslib.as_array(
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (n, context.model.n_vocab)
    )


def _open_model(stack: ExitStack, file: ModelFile, log: LlamaLog) -> Model:
    model = stack.enter_context(Model(file.path, log))
    if model.is_diffusion:
        raise UsageError(f"{file.path} is a diffusion model: it predicts no next token")
    if model.has_encoder or not model.has_decoder:
        raise UsageError(
            f"{file.path} has an encoder; only models that predict each next token from those "
            "before it can be compared by their outputs (--only weights)"
        )
    return model


def _check_same_vocabulary(reference: ModelFile, candidate: ModelFile) -> None:
    """Raise `UsageError` unless a token is the same text in both: else no probability of one can
    be held against one of the other."""
    ours, theirs = (file.arrays.get(_TOKENS) for file in (reference, candidate))
    if ours is None or theirs is None:
        return  # counted once the models are loaded
    what = f"{candidate.path} has another vocabulary than {reference.path}"
    if ours.count != theirs.count:
        raise UsageError(f"{what}: {theirs.count:,} tokens, not {ours.count:,}")
    pairs = zip(
        read_array(reference.path, ours, ours.count),
        read_array(candidate.path, theirs, theirs.count),
        strict=True,
    )
    for i, (one, other) in enumerate(pairs):
        if one != other:
            raise UsageError(f"{what}: token {i} is {other!r}, not {one!r}")


def _check_contexts(contexts: Sequence[Context]) -> None:
    reference = contexts[0].model
    for context in contexts:
        model = context.model
        if not context.memory:
            raise UsageError(
                f"{model.path} is an encoder; it predicts no next token (--only weights)"
            )
        if model.n_vocab != reference.n_vocab:
            raise UsageError(
                f"{model.path} has another vocabulary than {reference.path}: "
                f"{model.n_vocab:,} tokens, not {reference.n_vocab:,}"
            )


def _default_ctx(model: Model) -> int:
    trained = model.n_positions or model.n_ctx_train or DEFAULT_CTX
    return max(min(DEFAULT_CTX, trained), _MIN_CTX)


def _choose_batch(n_vocab: int) -> int:
    """Tokens to compute at once, so that a model's logits of them stay within `_LOGITS_BYTES`."""
    return min(max(_LOGITS_BYTES // (4 * n_vocab) // _ROWS, 1) * _ROWS, _MAX_BATCH)


def _first_token(model: Model) -> int:
    """What a text begins with: the BOS token, where there is none what separates texts."""
    for token in (model.api.llama_vocab_bos(model.vocab), model.api.llama_vocab_eos(model.vocab)):
        if 0 <= token < model.n_vocab:
            return int(token)
    return 0
