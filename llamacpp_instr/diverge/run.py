"""Runs two models over the same tokens, part by part, and compares every node.

A computes a part of a text, and its values are kept; then B computes the same part. A part has as
many tokens as fit into the memory that is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import OnProgress, counted, first_names
from llamacpp_instr.debugger.stop import debug
from llamacpp_instr.diverge.follow import Array, Comparison, TensorError
from llamacpp_instr.diverge.shares import Shares, measure_shares, mixtures
from llamacpp_instr.lab.quality.logits import (
    DEFAULT_SEED,
    WRITTEN_AT_ONCE,
    OutputOptions,
    WritingContext,
    check_comparison,
    check_contexts,
    open_model,
    write_chunks,
)
from llamacpp_instr.llama.crashes import last_words
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.generate import tokenize
from llamacpp_instr.llama.log import Interrupt, captured
from llamacpp_instr.model.file import ModelFile

_FREE = ("context_length", "vocab_size")
"""hyper-parameters that change no node of a graph; the vocabulary is compared token by token"""


def check_pair(a: ModelFile, b: ModelFile, options: OutputOptions) -> list[str]:
    """Raise `UsageError` with the first difference in the architecture, a hyper-parameter, the
    shape of a weight, or the vocabulary. Returns sentences about what only one of them has, which
    forbids nothing."""
    arch = a.architecture
    if arch != b.architecture:
        raise UsageError(
            f"{a.path} and {b.path} have different architectures: {arch} and {b.architecture}"
        )
    one, other = (
        {k: v for k, v in of.metadata.items() if k.startswith(f"{arch}.")} for of in (a, b)
    )
    for key in one:
        if key in other and one[key] != other[key] and key.removeprefix(f"{arch}.") not in _FREE:
            raise UsageError(
                f"{a.path} and {b.path} have different hyper-parameters: {key} is {one[key]} and"
                f" {other[key]}"
            )
    for weight in a.weights:
        twin = b.by_name.get(weight.name)
        if twin is not None and twin.ne != weight.ne:
            raise UsageError(
                f"{a.path} and {b.path} have different shapes: {weight.name} is"
                f" {' × '.join(map(str, weight.ne))} and {' × '.join(map(str, twin.ne))}"
            )
    check_comparison([a, b], options)
    return [
        f"Only {name} has the {what} {first_names(few)}."
        for name, what, few in (
            ("A", "hyper-parameter", sorted(one.keys() - other.keys())),
            ("B", "hyper-parameter", sorted(other.keys() - one.keys())),
            ("A", "weight", [w.name for w in a.weights if w.name not in b.by_name]),
            ("B", "weight", [w.name for w in b.weights if w.name not in a.by_name]),
        )
        if few
    ]


DEFAULT_TOKENS = 512
MAX_UBATCH = 512
_PADDING = 256
"""the cells that attention reads grow in steps of so many"""


@dataclass(frozen=True)
class DivergeOptions:
    """`tokens` in all, in chunks of `ctx`; None selects the default."""

    tokens: int = DEFAULT_TOKENS
    ctx: int | None = None
    memory: int = 512 * 2**20
    """bytes that the values of nodes may take"""
    threads: int | None = None


@dataclass(frozen=True)
class Divergences:
    errors: list[TensorError]
    """of each tensor, in the order in which they are computed"""
    kl: Array
    """(tokens,) in nats"""
    tokens: list[str]
    """their texts"""
    positions: list[int]
    """in their chunks"""
    differ: list[str]
    """the weights that are not the same in both"""
    notes: list[str] = field(default_factory=list)
    shares: Shares | None = None
    most_bytes: int = 0
    """of values that were in memory at once"""


class Pair:
    """Two models in memory, and the tokens that both compute."""

    def __init__(
        self,
        models: Sequence[LoadedModel],
        chunks: Sequence[Sequence[int]],
        options: DivergeOptions,
    ) -> None:
        self.models, self.chunks = models, chunks
        ctx = max(map(len, chunks))
        ubatch = min(ctx, MAX_UBATCH)
        self.choice = ContextOptions(ctx=ctx, batch=ubatch, ubatch=ubatch, threads=options.threads)
        self.comparison = Comparison([str(model.path) for model in models], options.memory)

    def compare(self, on_progress: OnProgress) -> int:
        """Compares all tokens; returns the most bytes of values that were in memory. `on_progress`
        gets tokens computed and in total."""
        comparison = self.comparison
        total, done, most = 2 * sum(map(len, self.chunks)), 0, 0
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_directory("instr-diverge-"))
            debugging = stack.enter_context(debug(folder / "session.log"))
            debugging.debugger.followers.append(comparison)
            contexts = [stack.enter_context(ModelContext(of, self.choice)) for of in self.models]
            check_contexts(contexts)
            per_token = 0
            for chunk in self.chunks:
                for context in contexts:
                    context.clear()
                at = 0
                while at < len(chunk):
                    # the first part, a single token, shows how much memory a token takes
                    n = min(_fitting(comparison.max_bytes, per_token, at), contexts[0].n_batch)
                    part = chunk[at : at + (n if per_token else 1)]
                    for side, context in enumerate(contexts):
                        comparison.of_b = bool(side)
                        context.decode(part, all_logits=True)
                        done += len(part)
                        on_progress(done, total)
                    comparison.end()
                    per_token = -(-comparison.n_bytes // len(part))
                    most = max(most, comparison.n_bytes)
                    at += len(part)
        return most

    def mixtures(self) -> AbstractContextManager[Callable[[Collection[str]], float]]:
        """Measures mixtures, after `compare`, which finds the weights."""
        return mixtures(self.models[0], self.comparison.weights, self.chunks, self.choice)

    def texts(self) -> list[str]:
        model = self.models[0]
        return [
            model.token_text(token) if model.has_tokenizer else str(token)
            for chunk in self.chunks
            for token in chunk
        ]


@contextmanager
def opened_pair(
    a: ModelFile, b: ModelFile, text: str | None, options: DivergeOptions
) -> Iterator[Pair]:
    """Loads both models. They compute the first tokens of `text`, or tokens that A writes. Raises
    `UsageError` for models or a text that cannot be used, `InstrError` if one fails inside."""
    read = None
    if text is not None:
        [read] = tokenize(a.path, [text], parse_special=False)
        if not read:
            raise UsageError("the text is empty; give a text of at least one token")
    interrupt = Interrupt()
    with interrupt.watching(), captured(interrupt) as log, ExitStack() as stack:
        stack.enter_context(last_words(lambda: (f"{a.path}, {b.path}", 1)))
        models = [open_model(stack, file, log) for file in (a, b)]
        yield Pair(models, _chunks(models[0], read, options), options)


def compare_models(
    a: ModelFile,
    b: ModelFile,
    text: str | None,
    options: DivergeOptions,
    why: bool,
    on_progress: OnProgress,
    on_exchange: OnProgress,
) -> Divergences:
    """The errors of B's tensors against A's on the first tokens of `text`, or on tokens that A
    writes; with `why` also the shares of the weights in the KL divergence. `on_progress` gets
    tokens computed, `on_exchange` exchanges made, each with the total. Raises `UsageError` for
    models that differ in more than their weights, `InstrError` if one fails."""
    notes = check_pair(a, b, OutputOptions(threads=options.threads))
    with opened_pair(a, b, text, options) as pair:
        most = pair.compare(on_progress)
        comparison, shares, texts = pair.comparison, None, pair.texts()
        differ = that_differ(a, b, [weight.name for weight in comparison.weights])
        if why:
            with pair.mixtures() as kl_of:
                shares = measure_shares(kl_of, differ, on_exchange)
    if len(texts) < options.tokens:
        notes.append(f"The text has only {counted(len(texts), 'token')}.")
    for name, only in zip("AB", comparison.not_shared, strict=True):
        if only:
            notes.append(f"Only {name} computes {first_names(sorted(only))}.")
    kl = np.concatenate(comparison.kl) if comparison.kl else np.full(len(texts), np.nan)
    positions = [i for chunk in pair.chunks for i in range(len(chunk))]
    errors = list(comparison.errors.values())
    return Divergences(errors, kl, texts, positions, differ, notes, shares, most)


def _chunks(
    model: LoadedModel, read: Sequence[int] | None, options: DivergeOptions
) -> list[list[int]]:
    """The tokens of a text, or those that the model writes: WRITTEN_AT_ONCE texts in parallel, as
    long as it takes."""
    trained = model.n_positions or model.n_ctx_train or DEFAULT_TOKENS
    n = options.tokens if read is None else min(options.tokens, len(read))
    if read is not None:
        ctx = options.ctx or min(n, DEFAULT_TOKENS, trained)
        return [list(read[i : min(i + ctx, n)]) for i in range(0, n, ctx)]
    ctx = options.ctx or min(max(-(-n // WRITTEN_AT_ONCE), 2), DEFAULT_TOKENS, trained)
    writing = ContextOptions(ctx=ctx, threads=options.threads)
    with WritingContext(model, writing) as writer:
        written = list(write_chunks(writer, -(-n // ctx), DEFAULT_SEED, lambda _n: None))
    left = n - ctx * (len(written) - 1)
    return [*written[:-1], written[-1][:left]]


def _fitting(max_bytes: int, per_token: int, at: int) -> int:
    """How many tokens fit, if one takes `per_token` bytes at position `at`. Attention without a
    fused kernel takes memory for each cell that it reads, and there will be more."""
    if not per_token:
        return 1
    n = max(max_bytes // per_token, 1)
    before, after = (-(-max(cells, 1) // _PADDING) for cells in (at, at + n))
    return max(n * before // after, 1)


def that_differ(a: ModelFile, b: ModelFile, names: Sequence[str]) -> list[str]:
    """Those of the weights that are not the same bytes of the same type."""
    found = []
    for name in dict.fromkeys(names):
        one, other = a.by_name[name], b.by_name.get(name)
        if other is not None and one.type == other.type:
            ours, theirs = (
                np.memmap(w.path, np.uint8, "r", w.offset, (w.n_bytes,)) for w in (one, other)
            )
            if np.array_equal(ours, theirs):
                continue
        found.append(name)
    return found
