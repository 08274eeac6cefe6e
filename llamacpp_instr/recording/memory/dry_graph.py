"""The graph that llama.cpp would build for a ubatch, from a model file, without computing it.

llama.cpp builds the graph in a dry run (see `memory.dry_run`), and the recorder writes it as it
writes any other graph: with layers, sources, parameters and the buffers of weights.

Invariant: the graph equals the one of a real ubatch after `past` tokens, but for three things. The
buffers of weights that a real load maps from the file are `CPU`, not `CPU_Mapped`, and what is
computed has none. A recurrent model's graph also clears its state, as before a first token. The
cache's window has the same number of cells, because the context is made as large as that window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.llama import native
from llamacpp_instr.llama.engine import ContextOptions, ModelContext
from llamacpp_instr.log.schema import Graph
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.recording.memory.dry_run import check_size, dry_context_log
from llamacpp_instr.recording.memory.plan import in_a_child

WINDOW = 256
"""the window of a cache is a multiple of so many cells: llama_kv_cache::get_n_kv"""


@dataclass(frozen=True)
class UbatchShape:
    """Consecutive tokens of one sequence."""

    tokens: int
    past: int = 0
    """tokens of the sequence that are in the cache"""
    outputs: int = 1
    """tokens whose logits are wanted"""


def dry_graphs(
    model: ModelFile, options: ContextOptions, ubatches: Sequence[UbatchShape]
) -> list[Graph]:
    """The graph of each ubatch, in a context with the options of `instr run`, whose size follows
    from the ubatch: `options.ctx` does not count.

    Raises `UsageError` for options that the model cannot run with, `LoadError` for a model that
    llama.cpp cannot load, `NativeError` without the patched library.
    """
    return in_a_child(_dry_graphs, model, options, ubatches)


def window(ubatch: UbatchShape) -> int:
    """Cells of the cache that llama.cpp gives the graph of this ubatch."""
    return -(-(ubatch.past + ubatch.tokens) // WINDOW) * WINDOW


def _dry_graphs(
    model: ModelFile, options: ContextOptions, ubatches: Sequence[UbatchShape]
) -> list[Graph]:
    options.check()
    for ubatch in ubatches:
        if ubatch.tokens < 1 or ubatch.past < 0 or not 1 <= ubatch.outputs <= ubatch.tokens:
            raise UsageError(f"{ubatch} is not a ubatch")
        check_size(window(ubatch))
    library = native.load()
    with dry_context_log(model, level="verbose") as (dry, content):
        for ubatch in ubatches:
            sized = replace(
                options,
                ctx=window(ubatch),
                batch=max(options.batch or 0, ubatch.tokens),
                ubatch=max(options.ubatch or 0, ubatch.tokens),
            )
            with ModelContext(dry, sized) as context:
                embeds = 0 if context.memory else ubatch.tokens
                if not embeds:
                    _reserve(library, context, ubatch)
            if embeds:  # such a model sees one ubatch only
                with ModelContext(dry, sized, embeds) as context:
                    _reserve(library, context, replace(ubatch, outputs=ubatch.tokens))
    return [_DECODER.decode(line) for line in content.splitlines() if line.startswith(_GRAPH)]


def _reserve(library: native.Native, context: ModelContext, ubatch: UbatchShape) -> None:
    assert context.handle is not None
    library.reserve_graph(context.handle, ubatch.tokens, 1, ubatch.outputs)


_GRAPH = b'{"event":"graph",'
_DECODER = msgspec.json.Decoder(Graph)
