"""The states of a model as llama.cpp computes them, beside those of the folder that it was imported
from."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.validate.against.compare import (
    EMBEDDINGS,
    FINAL_NORM,
    LOGITS,
    Array,
    Comparison,
    compare,
    layer,
)
from llamacpp_instr.converters.validate.against.theirs import Sizes, transformers_states
from llamacpp_instr.converters.validate.prompt import check_only_decodes, prompt_tokens
from llamacpp_instr.debugger.api import debug
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.residual import find_residual
from llamacpp_instr.debugger.rows import by_token, rows_of_nodes, token_numbers
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.lab.importer.source import Source
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.log import LlamaLog
from llamacpp_instr.model.file import ModelFile


class States:
    """Keeps the states of one compute; a follower of a `Debugger`."""

    def __init__(self) -> None:
        self.values: dict[str, Array] = {}
        """(tokens, width) by state"""
        self.nodes: dict[str, str] = {}
        """by state, the name of its node"""
        self._states: dict[int, list[str]] = {}

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """Raises `UsageError` for a graph without logits or without one residual stream."""
        residual = find_residual(graph)
        places = {EMBEDDINGS: residual.begin.index}
        places |= {layer(number): node.index for number, node in residual.after.items()}
        if (norm := graph.by_name.get("result_norm")) is not None:
            places[FINAL_NORM] = norm
        places[LOGITS] = residual.logits.index
        rows = rows_of_nodes(graph)
        if any(rows[index] is None for index in places.values()):
            raise UsageError(
                "this architecture's residual stream does not have one row for each token, so its "
                "layers cannot be compared"
            )
        self._rows = rows
        for state, index in places.items():
            self._states.setdefault(index, []).append(state)
        self.nodes = {state: graph.nodes[index].name for state, index in places.items()}
        return self._states

    def passed(self, stop: Stop) -> None:
        rows = self._rows[stop.node.index]
        assert rows is not None
        values = by_token(stop, rows)
        assert token_numbers(rows, stop.ubatch) == list(range(stop.ubatch.n_tokens))
        for state in self._states[stop.node.index]:
            self.values[state] = values.copy()


def compute_states(
    model: LoadedModel, tokens: Sequence[int], threads: int | None, flash_attn: str
) -> States:
    """The states of one prefill, with a cache in F32, so that it rounds nothing. Raises
    `UsageError` for a model that has no logits or no residual stream."""
    n = len(tokens)
    options = ContextOptions(
        ctx=n, batch=n, ubatch=n, threads=threads, cache_type_k="f32", cache_type_v="f32",
        flash_attn=flash_attn,
    )  # fmt: skip
    states = States()
    with (
        temporary_directory("instr-validate-") as folder,
        debug(folder / "session.log") as debugging,
        ModelContext(model, options) as context,
    ):
        debugging.debugger.followers.append(states)
        context.decode(tokens, all_logits=True)
    return states


def compare_with_transformers(
    file: ModelFile,
    source: Source,
    prompt: str | None,
    threads: int | None,
    flash_attn: str,
    log: LlamaLog,
    on_progress: OnProgress,
) -> Comparison:
    """The states of one prefill, of llama.cpp and of transformers, on the same tokens.

    Raises UsageError for a model that does not only decode, that has no residual stream, or that
    is not the folder's, and for a folder that transformers cannot load.
    """
    key = f"{file.architecture}.attention.causal"
    if not file.metadata.get(key, True):
        raise UsageError(f"{file.path} is an encoder; models that only decode can be validated")
    with LoadedModel(file.path, log) as model:
        check_only_decodes(model)
        tokens = prompt_tokens(model, prompt)
        sizes = Sizes(
            str(file.path),
            int(model.api.llama_model_n_layer(model.handle)),
            int(model.api.llama_model_n_embd(model.handle)),
            model.n_vocab,
        )
        # it refuses what does not fit; the file's pages are not read before it has ended
        theirs = transformers_states(source, sizes, tokens, threads, on_progress)
        ours = compute_states(model, tokens, threads, flash_attn)
    return compare(ours.values, theirs, ours.nodes)
