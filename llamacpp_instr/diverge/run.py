"""Runs two models over the same tokens, part by part, and compares every node.

A computes a part of a text, and its values are kept; then B computes the same part. A part has as
many tokens as fit into the memory that is allowed. Invariant: at any time the values of at most one
compute of A are in memory, and those of one node of B. Of their errors only sums are kept, in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import OnProgress, counted, first_names
from llamacpp_instr.debugger.graph import LiveGraph, Node, Ubatch
from llamacpp_instr.debugger.stop import Stop, debug
from llamacpp_instr.debugger.tensors import tensor_at
from llamacpp_instr.diverge.shares import SharedWeight, Shares, measure_shares, mixtures
from llamacpp_instr.lab.quality.divergence import kl_divergences
from llamacpp_instr.lab.quality.logits import (
    DEFAULT_SEED,
    WRITTEN_AT_ONCE,
    OutputOptions,
    WritingContext,
    check_comparison,
    check_contexts,
    opened_models,
    write_chunks,
)
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.generate import tokenize
from llamacpp_instr.log.graph.ops import Block
from llamacpp_instr.model.file import ModelFile

Array = NDArray[Any]


class Key(NamedTuple):
    """A node that runs, in both graphs. Several may have the same name; `place` numbers them."""

    name: str
    place: int


@dataclass
class TensorError:
    """Sums over all computes. `a` are the values of A, `d` those of B minus those of A."""

    key: Key
    op: str
    layer: int
    block: Block
    sources: tuple[Key, ...]
    """the nodes that it reads, through views"""
    weights: tuple[str, ...]
    """the weights that it reads, through views"""
    n: int = 0
    """elements"""
    squares: float = 0.0
    """of a"""
    error: float = 0.0
    """sum of the squares of d"""
    product: float = 0.0
    """sum of a d"""
    apart: int = 0
    """elements that are finite in one model only; for indices, those that differ"""
    is_index: bool = False
    channels: Array | None = None
    """(2, width) sums of the squares of d and of a by channel, for tensors with a row for each
    token"""
    parts: list[float] = field(default_factory=list)
    """the relative error of each compute alone"""
    rows: list[Array] = field(default_factory=list)
    """(2, tokens) of each compute: the same by token, for the last tensor of a layer"""

    @property
    def nmse(self) -> float:
        """The normalized mean squared error, as in test-backend-ops. For indices, the share that
        differs."""
        if self.is_index:
            return self.apart / self.n if self.n else 0.0
        return _nmse(self.error, self.squares, self.apart)

    @property
    def relative(self) -> float:
        """The norm of d divided by the norm of a: the root of `nmse`."""
        return math.sqrt(self.nmse)

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between both; None if one has no direction."""
        b = self.squares + 2 * self.product + self.error
        if self.is_index or self.apart or self.squares <= 0 or b <= 0:
            return None
        return min((self.squares + self.product) / math.sqrt(self.squares * b), 1.0)

    def add(self, a: Array, b: Array, has_tokens: bool, keeps_rows: bool) -> None:
        """Add values of one compute, of the same shape. `has_tokens` says that both are (tokens,
        width). Changes `b`."""
        self.n += a.size
        apart = self.apart
        if a.dtype.kind in "iu":
            self.is_index = True
            self.apart += int(np.count_nonzero(a != b))
            self.parts.append(math.sqrt((self.apart - apart) / a.size if a.size else 0.0))
            return
        with np.errstate(invalid="ignore", over="ignore"):
            d = np.subtract(b, a, out=b)
        if not (math.isfinite(_dot(a, a)) and math.isfinite(_dot(d, d))):
            a, d = self._without_infinite(a, d)
        if has_tokens:
            by_row = np.array([np.einsum("ij,ij->i", x, x) for x in (d, a)], np.float64)
            error, squares = by_row.sum(axis=1).tolist()
            by_channel = np.array([np.einsum("ij,ij->j", x, x) for x in (d, a)], np.float64)
            self.channels = by_channel if self.channels is None else self.channels + by_channel
            if keeps_rows:
                self.rows.append(by_row)
        else:
            error, squares = _dot(d, d), _dot(a, a)
        self.error += error
        self.squares += squares
        self.product += _dot(a, d)
        self.parts.append(math.sqrt(_nmse(error, squares, self.apart - apart)))

    def _without_infinite(self, a: Array, d: Array) -> tuple[Array, Array]:
        """Both without values that are not finite: masks have the same infinities in both, which
        is not an error; others count in `apart`."""
        known = np.isfinite(a) & np.isfinite(d)
        # d is NaN where both have the same infinity, or both have NaN
        same = ~np.isfinite(a) & np.isnan(d)
        self.apart += int(known.size - np.count_nonzero(known | same))
        return np.where(known, a, 0), np.where(known, d, 0)


def _nmse(error: float, squares: float, apart: int) -> float:
    if apart:
        return math.inf
    return error / squares if squares > 0 else math.inf if error else 0.0


def _dot(x: Array, y: Array) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.dot(x.reshape(-1), y.reshape(-1)))


_CACHE = b"cache_"
_AT_WORK = 4
"""copies of one tensor that a comparison makes"""


class Comparison:
    """A follower of a `Debugger`. Set `of_b` before each compute; after each compute of A, B
    computes the same tokens."""

    def __init__(self, names: Sequence[str], max_bytes: int) -> None:
        """`names` are those of both models, `max_bytes` bounds the values in memory."""
        self.names, self.max_bytes = names, max_bytes
        self.of_b = False
        self.errors: dict[Key, TensorError] = {}
        """in the order in which they are computed"""
        self.kl: list[Array] = []
        """(tokens,) of each compute: the KL divergence of the next token, NaN if it has none"""
        self.not_shared: tuple[set[str], set[str]] = set(), set()
        """names of nodes of only A, only B"""
        self.weights: list[SharedWeight] = []
        self.n_bytes = 0
        """what the latest compute of A needed, for all its tokens"""
        self._kept: dict[Key, Array] = {}
        self._keys: dict[int, Key] = {}
        self._last = -1
        self._ends: set[int] = set()
        self._weights: dict[tuple[Key, int], tuple[str, int]] = {}

    def wants(self, graph: LiveGraph, ubatch: Ubatch) -> Collection[int]:
        """All nodes that run, except those that only write into a cache. Raises `UsageError` if
        their values do not fit into memory."""
        seen: dict[str, int] = {}
        every: dict[int, Key] = {}
        for node in graph.nodes:
            place = seen[node.name] = seen.get(node.name, -1) + 1
            every[node.index] = Key(node.name, place)
        self._share_weights(graph, every)
        chosen = [node for node in graph.nodes if node.runs and not _writes_cache(node)]
        self._keys = {node.index: every[node.index] for node in chosen}
        self._last = chosen[-1].index if chosen else -1
        self._ends = set({node.layer: node.index for node in chosen if node.layer >= 0}.values())
        if not self.of_b:
            self._kept.clear()
            sizes = [4 * int(np.prod(node.shape)) for node in chosen]
            self.n_bytes = sum(sizes) + _AT_WORK * max(sizes, default=0)
            if self.n_bytes > self.max_bytes:
                mib, n = -(-self.n_bytes // 2**20), ubatch.n_tokens
                raise UsageError(
                    f"the values of {counted(n, 'token')} take {mib:,} MiB; give --memory"
                    f" {mib} or more"
                )
        for node in chosen:
            key = every[node.index]
            if key not in self.errors and not self.of_b:
                read = _read(node, graph, every)
                self.errors[key] = TensorError(key, node.op, node.layer, node.block, *read)
        return self._keys

    def passed(self, stop: Stop) -> None:
        """Keeps the value of A, or compares that of B with it."""
        key = self._keys[stop.node.index]
        values = stop.values()
        if not self.of_b:
            self._kept[key] = values
            return
        kept = self._kept.pop(key, None)
        if kept is None or kept.shape != values.shape:
            self.not_shared[1].add(key.name)
            return
        rows = _by_token(kept, stop)
        if rows is not None:
            kept, values = rows, values.reshape(rows.shape)
        if stop.node.index == self._last and rows is not None:
            try:
                self.kl.append(kl_divergences(self.names, rows, values))
            except InstrError:  # one has logits that are not numbers
                self.kl.append(np.full(len(rows), np.nan))
        self.errors[key].add(kept, values, rows is not None, stop.node.index in self._ends)

    def end(self) -> None:
        """Both computes are over: names what only A has."""
        self.not_shared[0].update(key.name for key in self._kept)
        for key in self._kept:
            self.errors.pop(key, None)
        self._kept.clear()

    def _share_weights(self, graph: LiveGraph, keys: dict[int, Key]) -> None:
        if self.weights:
            return
        read = {
            (keys[node.index], slot): (source.name, source.address)
            for node in graph.nodes
            for slot, source in enumerate(node.sources)
            if source.kind == "weight"
        }
        if not self.of_b:
            self._weights = read
            return
        both = [
            SharedWeight(name, address, read[at][1])
            for at, (name, address) in self._weights.items()
            if at in read
        ]
        self.weights = list(dict.fromkeys(both))


def _writes_cache(node: Node) -> bool:
    """Whether it writes into a cache what was computed, and compared, before."""
    view = tensor_at(node.address).view_src
    return bool(view) and bytes(tensor_at(view).name).startswith(_CACHE)


def _by_token(values: Array, stop: Stop) -> Array | None:
    """(tokens, width) if the tensor has this shape."""
    if values.dtype.kind in "iu" or stop.node.op == "SOFT_MAX":
        return None
    if values.ndim == 1 and stop.n_tokens == 1:
        return values[None, :]
    return values if values.ndim == 2 and len(values) == stop.n_tokens else None


def _read(
    node: Node, graph: LiveGraph, keys: dict[int, Key]
) -> tuple[tuple[Key, ...], tuple[str, ...]]:
    """The nodes and weights that a node reads, through views."""
    nodes: dict[Key, None] = {}
    weights: dict[str, None] = {}
    waiting = list(node.sources)
    while waiting:
        source = waiting.pop(0)
        if source.kind == "weight":
            weights[source.name] = None
        elif source.node >= 0:
            of = graph.nodes[source.node]
            if of.runs:
                nodes[keys[of.index]] = None
            else:
                waiting += of.sources
    return tuple(nodes), tuple(weights)


_FREE = ("context_length", "vocab_size")
"""hyper-parameters that change no node of a graph; the vocabulary is compared token by token"""


def check_pair(a: ModelFile, b: ModelFile, options: OutputOptions) -> list[str]:
    """Raise `UsageError` with the first difference in the architecture, a hyper-parameter, the
    shape of a weight, or the vocabulary. Returns sentences about what only one of them has, which
    prevents nothing."""
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
"""the step in which the number of cells that attention reads grows"""


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
        gets the tokens computed and their total."""
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
                    n = _fitting(comparison.max_bytes, per_token, at)
                    part = chunk[at : at + min(n, contexts[0].n_batch)]
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
    with opened_models([a, b]) as (models, _):
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
    """The tokens of a text, or those that the model writes: WRITTEN_AT_ONCE texts in parallel, each
    as long as needed."""
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
    fused kernel takes memory for each cell that it reads, and later tokens read more cells."""
    if not per_token:
        return 1
    n = max(max_bytes // per_token, 1)
    before, after = (-(-max(cells, 1) // _PADDING) for cells in (at, at + n))
    return max(n * before // after, 1)


def that_differ(a: ModelFile, b: ModelFile, names: Sequence[str]) -> list[str]:
    """The weights that do not have the same bytes of the same type in both."""
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
