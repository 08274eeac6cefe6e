"""Computes an importance matrix: for every product with a weight, the sums of the squares of its
inputs, by channel and by expert.

A follower of the debugger reads the inputs once llama.cpp has computed the product. Invariant: the
products that count, the tokens and their chunks are those of llama-imatrix
(tools/imatrix/imatrix.cpp). That adds in float32, this module in float64.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from math import ceil

import numpy as np

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.debugger.graph import LiveGraph, Node, Ubatch
from llamacpp_instr.debugger.stop import Stop, debug
from llamacpp_instr.debugger.tensors import Array, read, tensor_at
from llamacpp_instr.lab.quality.logits import (
    DEFAULT_CTX,
    OutputOptions,
    check_comparison,
    cut_chunks,
)
from llamacpp_instr.llama.crashes import last_words
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.generate import tokenize
from llamacpp_instr.llama.log import Interrupt, captured
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.model.imatrix import Computed, Sums
from llamacpp_instr.model.types import TYPES
from llamacpp_instr.recording.memory.plan import check_memory

_FEW_ROWS = 16
"""a product with fewer rows is left out, as in llama-imatrix"""


class Collector:
    """A follower of a `Debugger` that adds up squares."""

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}
        """by weight"""

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """The products with a layer's weight, and all products with experts."""
        return [node.index for node in graph.nodes if _counts(node)]

    def passed(self, stop: Stop) -> None:
        """Adds the squares of what a product has read. Raises `InstrError` if they are not
        finite."""
        product = tensor_at(stop.node.address)
        weight, name = tensor_at(product.src[0]), stop.node.sources[0].name
        values = _all_of(product.src[1])
        if stop.node.op == "MUL_MAT_ID":
            found = _by_expert(values[0], _all_of(product.src[2])[0, 0], weight.ne[2])
        else:
            found = _by_matrix(values, weight.ne[2], weight.ne[3])
        if before := self.sums.get(name):
            found = Sums(before.squares + found.squares, before.counts + found.counts)
        # llama.cpp's format has 32-bit numbers
        if not (found.squares <= np.finfo(np.float32).max).all():
            raise InstrError(
                f"the inputs of {name} are NaN or infinite, so they have no importance (`instr run "
                "--stats` finds the tensor where that begins)"
            )
        self.sums[name] = found


def _counts(node: Node) -> bool:
    """Whether llama-imatrix also reads it."""
    if node.op != "MUL_MAT":
        return node.op == "MUL_MAT_ID"
    given = tensor_at(node.sources[1].address)
    is_float = TYPES[given.type].name == "F32"
    return is_float and given.ne[1] >= _FEW_ROWS and node.sources[0].name.startswith("blk.")


def _all_of(address: int) -> Array:
    """(ne3, ne2, ne1, ne0) the values of a tensor."""
    return read(address).reshape(tuple(tensor_at(address).ne)[::-1])


def _by_matrix(given: Array, n2: int, n3: int) -> Sums:
    """For the input of a product with `n2` times `n3` matrices, which llama.cpp repeats."""
    m3, m2, rows, width = given.shape
    squares = np.einsum("abij,abij->abj", given, given, dtype=np.float64)
    of_matrix = squares.reshape(m3 // n3, n3, m2 // n2, n2, width).sum(axis=(0, 2))
    return Sums(of_matrix.reshape(-1), np.array([m3 * m2 * rows // (n2 * n3)]))


def _by_expert(given: Array, ids: Array, n_experts: int) -> Sums:
    """For (tokens, inputs, width) values and (tokens, experts used) numbers of experts: each expert
    has its own input, or all share one."""
    squares = np.zeros((n_experts, given.shape[2]))
    for expert in np.unique(ids):
        tokens, places = np.nonzero(ids == expert)
        rows = given[tokens, places % given.shape[1]]
        squares[expert] = np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
    return Sums(squares.reshape(-1), np.bincount(ids.reshape(-1), minlength=n_experts))


def compute_imatrix(
    file: ModelFile, text: str, options: OutputOptions, on_progress: OnProgress
) -> Computed:
    """The sums for the weights of `file` on the chunks of `text`. `on_progress` gets the tokens
    computed and their total. Raises `UsageError` for a model or a text that cannot be used,
    `InstrError` if the model fails."""
    check_comparison([file], options)
    if options.ctx is not None and options.ctx < _FEW_ROWS:
        raise UsageError(f"--ctx is {options.ctx}; it must be at least {_FEW_ROWS}")
    if options.batch is not None and options.batch < 2 * _FEW_ROWS:
        raise UsageError(f"--batch is {options.batch}; it must be at least {2 * _FEW_ROWS}")
    ctx = options.ctx or min(DEFAULT_CTX, file.trained_tokens or DEFAULT_CTX)
    batch = min(options.batch or DEFAULT_CTX, ctx)
    choice = ContextOptions(ctx=ctx, batch=batch, ubatch=batch, threads=options.threads)
    check_memory(file, choice)
    [tokens] = tokenize(file.path, [text], parse_special=False)
    collector, interrupt = Collector(), Interrupt()
    with interrupt.watching(), captured(interrupt) as log, ExitStack() as stack:
        stack.enter_context(last_words(lambda: (str(file.path), 1)))
        model = stack.enter_context(LoadedModel(file.path, log))
        if model.has_encoder:
            raise UsageError(
                f"{file.path} is like T5; models with a separate encoder are not supported"
            )
        chunks = cut_chunks(model, tokens, ctx, options.chunks)
        folder = stack.enter_context(temporary_directory("instr-imatrix-"))
        debugging = stack.enter_context(debug(folder / "session.log", "minimal"))
        debugging.debugger.followers.append(collector)
        context = stack.enter_context(ModelContext(model, choice))
        n_parts = ceil(ctx / batch)
        if n_parts > 1 and context.takes_whole_prompts:
            raise UsageError(
                f"{file.path} computes a whole chunk at once; give --batch {ctx}, or a smaller "
                "--ctx"
            )
        log.release()  # the input is valid
        for i, chunk in enumerate(chunks):
            context.clear()
            done = i * ctx
            # parts of about equal length, so that none has too few rows
            for part in np.array_split(chunk, n_parts):
                # all logits: without them the last layer computes the last token only
                context.decode(part.tolist(), all_logits=True)
                done += len(part)
                on_progress(done, ctx * len(chunks))
    return Computed(collector.sums, len(chunks), ctx)
