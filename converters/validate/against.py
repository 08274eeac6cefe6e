"""`instr validate --reference`: the states of every layer beside those of transformers.

A state is a matrix in float32 with a row for each token. Those of llama.cpp and of transformers
have the same names, in the order of the compute: `embeddings`, `layer 0`, ..., `final norm`,
`logits`. transformers computes the folder that the model was imported from, in a child process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.child import Child, ChildDied, ChildFailed
from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import OnProgress, counted
from llamacpp_instr.converters.validate.live import check_only_decodes, followed, prompt_tokens
from llamacpp_instr.converters.validate.run import Verdict
from llamacpp_instr.converters.validate.worker import EMBEDDINGS, FINAL_NORM, LOGITS, layer
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch, rows_of_nodes, token_numbers
from llamacpp_instr.debugger.residual import find_residual
from llamacpp_instr.debugger.stop import Stop, by_token
from llamacpp_instr.lab.importer.source import Kind, Source, open_source
from llamacpp_instr.llama.build.wheel import own_cache
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel
from llamacpp_instr.llama.log import LlamaLog
from llamacpp_instr.model.file import ModelFile
from llamacpp_instr.model.types import GgmlType
from llamacpp_instr.report.report import Cell, Column, Report, columns_of

Array = npt.NDArray[np.float32]

OF_F32 = 1e-3
"""the largest relative error with weights in F32, where only the order of sums differs"""
_STEPS, _LARGEST = 16, 0.5
_SIGNIFICANT_BITS = {"F16": 11, "BF16": 8}


@dataclass(frozen=True)
class Compared:
    """One state of both implementations."""

    state: str
    node: str
    """of llama.cpp's graph"""
    error: float
    """relative: the norm of the difference, divided by that of transformers' values"""
    cosine: float
    """the lowest of all tokens"""
    token: int
    """the place of the token with the largest relative error, from 0"""


@dataclass(frozen=True)
class Comparison:
    """All states, in the order of the compute."""

    states: list[Compared]
    n_tokens: int
    same_top: int
    """tokens after which both find the same next token most probable"""


def compare(
    ours: Mapping[str, Array], theirs: Mapping[str, Array], nodes: Mapping[str, str]
) -> Comparison:
    """The states that both have; `nodes` names llama.cpp's node of each."""
    states = []
    for name in (name for name in ours if name in theirs):
        a, b = ours[name].astype(np.float64), theirs[name].astype(np.float64)
        norms, part = np.linalg.norm(b, axis=1), np.linalg.norm(a - b, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            of_tokens = _finite(part / norms)
            cosines = np.nan_to_num((a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * norms))
            error = float(_finite(np.linalg.norm(a - b) / np.linalg.norm(b)))
        worst = int(of_tokens.argmax())
        states.append(Compared(name, nodes[name], error, float(cosines.min()), worst))
    tops = [np.nan_to_num(logits).argmax(axis=1) for logits in (ours[LOGITS], theirs[LOGITS])]
    return Comparison(states, len(tops[0]), int((tops[0] == tops[1]).sum()))


def _finite(errors: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Errors with infinity where a value is not a number."""
    return np.nan_to_num(errors, nan=np.inf, posinf=np.inf)


def default_bound(file: ModelFile) -> tuple[float, GgmlType]:
    """The largest relative error that the weights' own rounding explains, and the coarsest type
    among those of matrices, which decides it. OF_F32 for F32. Otherwise 16 times the distance of
    two neighboring numbers of the type, 2^-bits, but at most 0.5: F16 has 11 significant bits, BF16
    has 8, and a quantized type has its bits per weight. The factor is 16 because the errors of
    layers add up: random models of two to six layers reach 1.5 to 15 times that distance."""
    types = [weight.type for weight in file.weights if len(weight.ne) > 1]
    coarsest = min(types, key=_bits)
    if coarsest.name == "F32":
        return OF_F32, coarsest
    return min(_LARGEST, _STEPS * 2.0 ** -_bits(coarsest)), coarsest


def _bits(type_: GgmlType) -> int:
    return _SIGNIFICANT_BITS.get(type_.name, int(type_.bits_per_weight))


def open_reference(folder: Path) -> Source:
    """The Hugging Face model in a folder. Raises UsageError if there is none, or if files are
    missing."""
    source = open_source(folder)
    if source.kind is not Kind.HUGGING_FACE:
        raise UsageError(f"{folder} is {source.kind.value}; --reference needs a Hugging Face model")
    return source


def transformers_states(
    source: Source,
    sizes: dict[str, Any],
    tokens: Sequence[int],
    threads: int | None,
    on_progress: OnProgress,
) -> dict[str, Array]:
    """The values of each state, (tokens, width), with the folder's weights in float32. `sizes` is
    what both models must agree on (`worker.check_sizes`). `on_progress` gets layers done and in
    total, once the weights are loaded. Raises UsageError if the sizes differ, or if transformers
    cannot load the folder; InstrError if it dies."""
    log = own_cache() / "logs" / f"against-{source.path.resolve().name}.log"
    with temporary_directory("instr-against-") as staging:
        request = {
            "folder": str(source.path),
            "weights": [str(file) for file in source.weights],
            "sizes": sizes,
            "tokens": list(tokens),
            "threads": threads,
            "staging": str(staging),
        }
        try:
            with Child(f"{__package__}.worker", log) as child:
                names: list[str] = child.ask(request, on_progress)
        except ChildFailed as failed:
            why = f"transformers cannot run it: {failed}; its log is {log}"
            if "trust_remote_code" in failed.text:
                why = "the model needs its own Python code, which instr does not run"
            raise UsageError(f"{source.path}: {why}") from None
        except ChildDied as died:
            raise InstrError(f"{source.path}: transformers died {died}; its log is {log}") from None
        return {name: np.load(staging / f"{name}.npy", allow_pickle=False) for name in names}


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
    with followed(model, options, states) as context:
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
    """The states of one prefill, of llama.cpp and of transformers, on the same tokens. Raises
    UsageError for a model that is not decoder-only, that has no residual stream, or that is not the
    folder's, and for a folder that transformers cannot load."""
    key = f"{file.architecture}.attention.causal"
    if not file.metadata.get(key, True):
        raise UsageError(f"{file.path} is an encoder; only decoder models can be validated")
    with LoadedModel(file.path, log) as model:
        check_only_decodes(model)
        tokens = prompt_tokens(model, prompt)
        sizes = {
            "path": str(file.path),
            "n_layers": int(model.api.llama_model_n_layer(model.handle)),
            "width": int(model.api.llama_model_n_embd(model.handle)),
            "n_vocab": model.n_vocab,
        }
        # this refuses what does not fit; the file's pages are not read before it has ended
        theirs = transformers_states(source, sizes, tokens, threads, on_progress)
        ours = compute_states(model, tokens, threads, flash_attn)
    return compare(ours.values, theirs, ours.nodes)


def judge_states(found: Comparison, bound: float, why: str) -> Verdict:
    """A row for each state, in the order of the compute. `why` says where the bound comes from."""
    rows: list[list[Cell]] = [
        [of.state, of.node, of.error, of.cosine, of.token, "ok" if of.error <= bound else "beyond"]
        for of in found.states
    ]
    columns = [
        *columns_of("text", "state", "node"), Column("relative error", "number"),
        Column("cosine", "cosine"), Column("worst token", "number"), Column("verdict"),
    ]  # fmt: skip
    table = Report("States of llama.cpp against transformers in float32", columns, rows)
    first = next((of for of in found.states if of.error > bound), None)
    table.notes += [
        f"They diverge at {first.state}: its error is the first beyond {bound:.4g} ({why})."
        if first
        else f"They agree: no error is beyond {bound:.4g} ({why}).",
        "relative error: the norm of the difference, divided by the norm of transformers' values;"
        " cosine: the lowest of all tokens; worst token: the one with the largest error, from 0.",
        f"Both find the same next token most probable after {found.same_top:,} of"
        f" {counted(found.n_tokens, 'token')}.",
    ]
    table.figures = {
        "bound": (bound, "number"),
        "parts at": (first.state if first else None, "text"),
        "tokens": (found.n_tokens, "count"),
        "same most probable": (found.same_top, "count"),
    }
    return Verdict([table], first is None)
