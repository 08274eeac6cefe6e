"""Runs the beginning of a recorded session again, and captures the tensors of its workloads.

Invariant: inputs are those that the kernel had. So a value is read as soon as it is computed,
because ggml may reuse its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.exports.flashinfer.definition import Use
from llamacpp_instr.converters.exports.flashinfer.uses import (
    Case,
    View,
    case_of,
    cells_of,
    kind_of,
    uses_of,
    views_of_mask,
)
from llamacpp_instr.converters.exports.flashinfer.workloads import (
    OUTPUT,
    Found,
    Workload,
    simple_case,
    write_tensors,
)
from llamacpp_instr.converters.exports.tensors import Tensors
from llamacpp_instr.converters.validate.live import (
    Inputs,
    as_event,
    followed,
    vocabulary,
    weight_reader,
)
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import read
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel
from llamacpp_instr.llama.log import LlamaLog
from llamacpp_instr.log.schema import Model
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import counted_steps
from llamacpp_instr.model.file import ModelFile

Array = npt.NDArray[Any]
ValueOf = Callable[[int], Array]
"""the values of a tensor that has memory of its own"""


def value_at(tensors: Tensors, tensor: int, value_of: ValueOf) -> Array:
    """The values of a tensor, in four dimensions: for a view, those that it shows."""
    place = tensors.place(tensor)
    whole = np.ascontiguousarray(value_of(place.base)).ravel()[place.offset :]
    strides = [n * whole.itemsize for n in place.strides]
    view = np.lib.stride_tricks.as_strided(whole, place.shape, strides, writeable=False)
    copied: Array = view.copy()
    return copied


def arrays_of_use(g: Tensors, use: Use, value_of: ValueOf) -> tuple[Case, dict[str, Array]]:
    """The case of a use that has been computed, and its inputs and its output."""
    values = {name: value_at(g, tensor, value_of) for name, tensor in use.reads.items()}
    output = value_at(g, use.nodes[-1], value_of)
    if use.attention:
        return _of_attention(g, use, values, output)
    definition, case = use.definition, simple_case(use.definition, use)
    arrays = {
        name: np.ascontiguousarray(values[name].reshape(definition.shape(name, use.axes)), of.dtype)
        for name, of in definition.inputs.items()
    }
    (name, of), *_ = definition.outputs.items()
    shape = definition.shape(name, use.axes)
    # ARGSORT gives the order of all; only the first are used
    rows = output.reshape(shape[0], -1)[:, : shape[1]] if name == "indices" else output
    return case, arrays | {OUTPUT + name: np.ascontiguousarray(rows.reshape(shape), of.dtype)}


def _of_attention(
    g: Tensors, use: Use, values: dict[str, Array], output: Array
) -> tuple[Case, dict[str, Array]]:
    # (streams, heads, rows, width) as (streams and rows, heads, width)
    q, k, v = (
        of.transpose(0, 2, 1, 3).reshape(-1, of.shape[1], of.shape[3])
        for of in (values[name] for name in "qkv")
    )
    streams, n_kv = values["k"].shape[0], values["k"].shape[2]
    n_rows = len(q) // streams
    visible = np.ones((streams, n_rows, n_kv), np.bool_)
    if "mask" in values:
        mask = values["mask"][:, 0, :n_rows]
        visible = np.broadcast_to(mask > -np.inf, visible.shape)
    views = [
        View(of.queries, [cell + i * n_kv for cell in of.cells], of.window, of.causal)
        for i in range(streams)
        for of in views_of_mask(visible[i])
    ]
    case = case_of(g, use, views)
    arrays: dict[str, Array] = dict(case.integers)
    inputs = case.definition.inputs
    if "ckv_cache" in inputs:
        dim_v = v.shape[2]
        behind = g.place(use.reads["v"]).offset > g.place(use.reads["k"]).offset
        latent = slice(-dim_v, None) if behind else slice(dim_v)
        rotary = slice(-dim_v) if behind else slice(dim_v, None)
        arrays |= {"q_nope": q[..., latent], "q_pe": q[..., rotary]}
        arrays |= {"ckv_cache": k[..., latent], "kpe_cache": k[..., rotary]}
    elif "k_cache" in inputs:
        arrays |= {"q": q, "k_cache": k[:, None], "v_cache": v[:, None]}
    else:
        cells = cells_of(views)
        arrays |= {"q": q, "k": k[cells], "v": v[cells]}
    if "sinks" in inputs:
        arrays["sinks"] = values["sinks"].reshape(-1)
    arrays = {name: np.ascontiguousarray(of, inputs[name].dtype) for name, of in arrays.items()}
    # the result has heads before tokens
    arrays[f"{OUTPUT}output"] = output.reshape(len(q), -1, v.shape[2])
    return case, arrays


class Capturer:
    """A follower of a `Debugger`. `weight` reads a weight by its name; `keep` gets each workload of
    `found` once, with its tensors, and stores them."""

    def __init__(
        self,
        found: Found,
        weight: Callable[[str], Array],
        keep: Callable[[Workload, dict[str, Array]], object],
    ) -> None:
        self._found, self._weight, self._keep = found, weight, keep

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """The nodes of one use of each kind, and what computes their inputs."""
        event = as_event(graph)
        self._tensors = Tensors(event)
        self._values: dict[int, Array] = {}
        self._uses: dict[int, list[Use]] = {}
        kinds: dict[Any, Use] = {}
        for use in uses_of(self._tensors):
            kinds.setdefault(kind_of(self._tensors, use), use)
        for use in kinds.values():
            self._uses.setdefault(use.nodes[-1], []).append(use)
        tensors = [
            tensor for use in kinds.values() for tensor in (*use.reads.values(), use.nodes[-1])
        ]
        self._bases = {self._tensors.place(tensor).base for tensor in tensors}
        self._inputs = Inputs(event, self._bases)
        runs = [node.index for node in graph.nodes if node.runs]
        computed = (i for i in runs if self._tensors.place(i).base in self._bases)
        return {runs[0], *computed, *self._inputs.readers}

    def passed(self, stop: Stop) -> None:
        """Reads what was computed, and keeps the tensors of a use whose last node it was."""
        tensors = self._tensors
        self._values.update(self._inputs.read(stop))
        base = tensors.place(stop.node.index).base
        if base in self._bases:
            self._values[base] = read(stop.graph.address_of(base))
        for use in self._uses.get(stop.node.index, ()):
            case, arrays = arrays_of_use(tensors, use, self._value)
            workload = self._found.workload(case)
            if not workload.stored:
                self._keep(workload, arrays)

    def _value(self, tensor: int) -> Array:
        if self._tensors.is_weight(tensor):
            return self._weight(self._tensors.name(tensor))
        return self._values[tensor]


DECODES = 1


def only_model(session: Session) -> Model:
    """The model whose tensors can be captured. Raises `UsageError` for several."""
    if len(session.models) != 1:
        raise UsageError(f"{session.path}: --capture needs a log of one model")
    return next(iter(session.models.values()))


def capture(
    file: ModelFile,
    session: Session,
    found: Found,
    folder: Path,
    log: LlamaLog,
    on_progress: OnProgress,
) -> None:
    """Computes a prefill of as many tokens as the first of the session, with the session's context
    and the beginning of its prompt, and a decode. Writes the tensors of each workload, which
    `found` then has, into the data set in `folder`; `on_progress` gets computes done and in total.
    Raises `UsageError` for a session without steps, and for a weight whose type has no conversion
    to numbers."""
    steps, _ = counted_steps(session)
    if not len(steps):
        raise UsageError(f"{session.path}: no step to run again")
    # the first is a decode if the prompt has one token
    first = int(np.argmax(steps["phase"] != "decode"))
    context = session.contexts[int(steps["ctx"][first])]
    n = int(steps["n_tokens"][first])
    options = ContextOptions(
        ctx=context.n_ctx, batch=max(n, context.n_batch), ubatch=context.n_ubatch,
        threads=context.n_threads, cache_type_k=context.type_k, cache_type_v=context.type_v,
        flash_attn="on" if context.flash_attn else "off",
    )  # fmt: skip
    weight, keep = weight_reader(file), partial(write_tensors, found, folder)
    with LoadedModel(file.path, log) as model:
        tokens = _tokens(model, session, n)
        with followed(model, options, Capturer(found, weight, keep)) as made:
            made.decode(tokens)
            on_progress(1, DECODES + 1)
            if model.has_decoder and context.causal:
                for step in range(DECODES):
                    made.decode(tokens[-1:])
                    on_progress(step + 2, DECODES + 1)


def _tokens(model: LoadedModel, session: Session, n: int) -> list[int]:
    """The first `n` tokens of the recorded prompt, repeated if it is shorter; for logs without one,
    tokens of the vocabulary."""
    args: Any = session.start.args
    prompts = args.get("prompts") if isinstance(args, dict) else None
    text = prompts[0] if isinstance(prompts, list) and prompts else None
    tokens = list(model.tokenize(text)) if isinstance(text, str) and text else []
    tokens = tokens or vocabulary(model, n)
    return (tokens * -(-n // len(tokens)))[:n]
