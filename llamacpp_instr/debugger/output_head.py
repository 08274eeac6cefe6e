"""The end of a graph, from the last layer's output to the logits, computed again for other rows.

The ops are cloned into a graph of their own, with the model's own weights where they lie, so what
is computed is what the model computes: output norm, head, scaling and capping of any architecture.

Invariant: ggml ends the process on misuse, so what cannot be cloned is refused before it is called.
The graph runs in a thread of its own, because a recorder times every kernel of the thread that
computes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import InstrError, NativeError, UsageError
from llamacpp_instr.debugger.ggml import MAX_SRC, Tensor, ggml, tensor_at
from llamacpp_instr.debugger.graph import LiveGraph, Node
from llamacpp_instr.debugger.residual import Residual
from llamacpp_instr.debugger.tensors import Array
from llamacpp_instr.llama.native import POINTER, InitParams, Signatures, declare
from llamacpp_instr.llama.threads import default_threads
from llamacpp_instr.model.types import TYPES

_F32 = 0  # GGML_TYPE_F32
_CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_MAX_BYTES = 2**31
_ROWS = "out_ids"
"""the input that selects the rows of the tokens whose logits are wanted"""


class Tail:
    """The ops after a node, up to the logits; `with` frees them."""

    def __init__(self, graph: LiveGraph, residual: Residual) -> None:
        """Raises `UsageError` if they cannot be computed apart from the rest."""
        self._lib = _functions()
        self._ctx: int | None = None
        self._backend: int | None = None
        self._buffer: int | None = None
        self._graph = self._input = self._output = 0
        self.width = self._n_in = self._n = self.n_vocab = 0
        try:
            self._build(graph, residual)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the graph."""
        for free, what in (
            (self._lib.ggml_backend_buffer_free, self._buffer),
            (self._lib.ggml_backend_free, self._backend),
            (self._lib.ggml_free, self._ctx),
        ):
            if what:
                free(what)
        self._ctx = self._backend = self._buffer = None

    def logits(self, rows: Array) -> npt.NDArray[np.float32]:
        """(rows, vocabulary) the logits if the stream after the last layer were `rows`, of the
        shape (rows, width)."""
        if rows.ndim != 2 or rows.shape[1] != self.width:
            raise UsageError(f"rows of the shape {rows.shape} are not of the width {self.width}")
        found = [self._compute(rows[i : i + self._n]) for i in range(0, len(rows), self._n)]
        return np.concatenate(found) if found else np.empty((0, self.n_vocab), np.float32)

    def _compute(self, rows: Array) -> npt.NDArray[np.float32]:
        """At most as many rows as the graph has; the others are zero."""
        full = np.zeros((self._n_in, self.width), np.float32)
        full[: len(rows)] = rows
        self._lib.ggml_backend_tensor_set(self._input, full.ctypes.data, 0, full.nbytes)
        status: list[int] = []
        thread = threading.Thread(
            target=lambda: status.append(
                self._lib.ggml_backend_graph_compute(self._backend, self._graph)
            )
        )
        thread.start()
        thread.join()
        if status != [0]:
            raise InstrError("ggml could not compute the end of the graph")
        out = np.empty((self._n, self.n_vocab), np.float32)
        self._lib.ggml_backend_tensor_get(self._output, out.ctypes.data, 0, out.nbytes)
        return out[: len(rows)]

    def _build(self, graph: LiveGraph, residual: Residual) -> None:
        end = residual.end
        nodes = _needed(graph, end, residual.logits)
        self._check(nodes, end)
        lib = self._lib
        room = (len(nodes) + 8) * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead()
        self._ctx = lib.ggml_init(InitParams(room, None, True))
        if not self._ctx:
            raise NativeError("ggml gets no memory for a graph")
        clones: dict[int, int] = {}
        self._input = clones[end.address] = self._clone(tensor_at(end.address), {}, is_leaf=True)
        rows = graph.leafs.get(_ROWS)
        if rows:
            clones[rows] = self._clone(tensor_at(rows), {}, is_leaf=True)
        for node in nodes:
            clones[node.address] = self._clone(tensor_at(node.address), clones)
        self._output = clones[residual.logits.address]
        first, last = tensor_at(self._input), tensor_at(self._output)
        self.width, self._n_in = int(first.ne[0]), int(first.ne[1])
        self.n_vocab, self._n = int(last.ne[0]), int(last.ne[1])
        if self._n > self._n_in or last.ne[2] * last.ne[3] != 1:
            raise UsageError("the logits are not rows of the stream after the last layer")
        device = self._device(nodes)
        for node in nodes:
            if not lib.ggml_backend_dev_supports_op(device, clones[node.address]):
                raise UsageError(f"the device of the output weights cannot compute {node.op} alone")
        self._backend = lib.ggml_backend_dev_init(device, None)
        if not self._backend:
            raise NativeError("ggml gets no backend for the output weights")
        if lib.ggml_backend_dev_type(device) == _CPU:
            lib.ggml_backend_cpu_set_n_threads(self._backend, default_threads())
        self._buffer = lib.ggml_backend_alloc_ctx_tensors(self._ctx, self._backend)
        if not self._buffer:
            raise NativeError("ggml gets no memory for the logits")
        if rows:  # the rows that the model would select are the first ones here
            first_rows = np.arange(self._n, dtype=np.int32)
            lib.ggml_backend_tensor_set(clones[rows], first_rows.ctypes.data, 0, first_rows.nbytes)
        self._graph = lib.ggml_new_graph(self._ctx)
        lib.ggml_build_forward_expand(self._graph, self._output)

    def _clone(self, of: Tensor, clones: dict[int, int], is_leaf: bool = False) -> int:
        """A tensor that is computed as `of` is, from the clones of its sources."""
        ne = [max(1, n) for n in of.ne]  # a ubatch without outputs has no rows
        address: int = self._lib.ggml_new_tensor(self._ctx, of.type, 4, (ctypes.c_int64 * 4)(*ne))
        clone = tensor_at(address)
        clone.name = of.name
        if is_leaf:
            return address
        clone.op, clone.op_params = of.op, of.op_params
        for i in range(MAX_SRC):
            if of.src[i]:
                clone.src[i] = clones.get(of.src[i], of.src[i])
        if of.view_src:
            # a view of a view has the first tensor as its source
            clone.nb = of.nb
            clone.view_src = clones.get(of.view_src, of.view_src)
            clone.view_offs = of.view_offs
        return address

    def _check(self, nodes: list[Node], end: Node) -> None:
        inside = {end.address, *(node.address for node in nodes)}
        tensor = tensor_at(end.address)
        if tensor.type != _F32 or prod(tensor.ne[2:]) != 1 or tensor.view_src:
            raise UsageError(f"{end.name}, the stream after the last layer, is not a matrix")
        for node in nodes:
            of = tensor_at(node.address)
            if node.runs and of.view_src:
                raise UsageError(f"{node.name} writes into another tensor; it cannot be repeated")
            if of.view_src and of.view_src not in inside:
                raise UsageError(f"{node.name} shows a tensor of before the last layer's output")
            for source in node.sources:
                if source.node >= 0 and source.address not in inside:
                    raise UsageError(
                        f"{node.name} reads {source.name} besides the stream after the last layer; "
                        "the logit lens cannot tell what other layers would have in its place"
                    )
                if source.node < 0 and source.kind != "weight" and source.name != _ROWS:
                    raise UsageError(
                        f"{node.name} reads {source.name}, an input, after the last layer; the "
                        "logit lens reads only weights there"
                    )
        size = sum(
            TYPES[tensor_at(node.address).type].row_bytes(
                int(prod(max(1, n) for n in tensor_at(node.address).ne))
            )
            for node in nodes
        )
        if size > _MAX_BYTES:
            raise UsageError(
                f"the logits of this compute take {size:,} bytes; ask for those of fewer tokens"
            )

    def _device(self, nodes: list[Node]) -> int:
        """The device of the weights that the tail reads. Raises `UsageError` for several."""
        lib = self._lib
        devices: dict[int, str] = {}
        for source in (s for node in nodes for s in node.sources if s.kind == "weight"):
            buffer = tensor_at(source.address).buffer
            kind = lib.ggml_backend_buffer_get_type(buffer)
            # memory of the host belongs to the device that shares it, but the CPU computes there
            device = (
                None
                if lib.ggml_backend_buft_is_host(kind)
                else lib.ggml_backend_buft_get_device(kind)
            )
            device = device or lib.ggml_backend_dev_by_type(_CPU)
            devices[device] = source.name
        if len(devices) > 1:
            raise UsageError(
                "the logit lens needs all weights after the last layer on one device; "
                f"{' and '.join(devices.values())} are on several"
            )
        return next(iter(devices), None) or int(lib.ggml_backend_dev_by_type(_CPU))


def _needed(graph: LiveGraph, end: Node, logits: Node) -> list[Node]:
    """The nodes after `end` that the logits need."""
    needed = {logits.index}
    for i in range(logits.index, end.index, -1):
        if i in needed:
            needed |= {source.node for source in graph.nodes[i].sources if source.node > end.index}
    return [graph.nodes[i] for i in sorted(needed)]


@functools.cache
def _functions() -> Any:
    ggml()  # checks what the tensors look like
    size, i32 = ctypes.c_size_t, ctypes.c_int
    signatures: Signatures = {
        "ggml_init": (POINTER, [InitParams]),
        "ggml_free": (None, [POINTER]),
        "ggml_graph_overhead": (size, []),
        "ggml_new_graph": (POINTER, [POINTER]),
        "ggml_new_tensor": (POINTER, [POINTER, i32, i32, ctypes.POINTER(ctypes.c_int64)]),
        "ggml_build_forward_expand": (None, [POINTER, POINTER]),
        "ggml_backend_alloc_ctx_tensors": (POINTER, [POINTER, POINTER]),
        "ggml_backend_buffer_free": (None, [POINTER]),
        "ggml_backend_buffer_get_type": (POINTER, [POINTER]),
        "ggml_backend_buft_get_device": (POINTER, [POINTER]),
        "ggml_backend_buft_is_host": (ctypes.c_bool, [POINTER]),
        "ggml_backend_dev_by_type": (POINTER, [i32]),
        "ggml_backend_dev_type": (i32, [POINTER]),
        "ggml_backend_dev_init": (POINTER, [POINTER, ctypes.c_char_p]),
        "ggml_backend_dev_supports_op": (ctypes.c_bool, [POINTER, POINTER]),
        "ggml_backend_free": (None, [POINTER]),
        "ggml_backend_cpu_set_n_threads": (None, [POINTER, i32]),
        "ggml_backend_graph_compute": (i32, [POINTER, POINTER]),
    }
    return declare(signatures)
