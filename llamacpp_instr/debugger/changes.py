"""Changes values while a compute is stopped, and says so in the log with a note `instr.change`.

A change is an `Edit` of the values of a tensor, or of a part of them. `change` makes one at a stop;
followers make it again in every compute, or take a head, a block or a layer out of every compute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import UsageError, reason
from llamacpp_instr.base.system import need
from llamacpp_instr.debugger import tensors
from llamacpp_instr.debugger.attention import attention_node
from llamacpp_instr.debugger.graph import LiveGraph, Node
from llamacpp_instr.debugger.residual import Part, block_outputs, find_residual
from llamacpp_instr.debugger.stop import OfGraph, Stop
from llamacpp_instr.debugger.tensors import Array, Slice

NOTE = "instr.change"
_HEADER = 1 << 16  # bytes of the header of an array in a file, at most

Note = Callable[[str, Any], None]
"""writes a note into the log: `Recording.note`"""


class Edit(NamedTuple):
    """What a change does to values."""

    what: str
    """in words, for the log"""
    new: Callable[[Array], npt.ArrayLike]
    """returns the values that replace an array of them: as many, or one for all"""


def set_to(value: float) -> Edit:
    """Every value becomes `value`."""
    return Edit(f"set to {value:g}", lambda _: np.float64(value))


def zero() -> Edit:
    return Edit("zero", lambda _: np.float64(0))


def scale(factor: float) -> Edit:
    """Every value times `factor`."""
    return Edit(f"scale by {factor:g}", lambda values: values * values.dtype.type(factor))


def add_noise(deviation: float, seed: int) -> Edit:
    """Adds normal noise of this standard deviation; a seed gives the same one in every compute."""

    def noisy(values: Array) -> Array:
        random = np.random.default_rng(seed)
        noise = random.normal(0, deviation, values.shape)
        return np.asarray(values + noise.astype(values.dtype))

    return Edit(f"add noise of deviation {deviation:g}, seed {seed}", noisy)


def replace(values: Array | Path, origin: str) -> Edit:
    """The values of another array, or of a file with one, of the same shape."""

    def replaced(old: Array) -> Array:
        new = load_values(values, most=old.size) if isinstance(values, Path) else values
        if np.shape(new) != old.shape:
            raise UsageError(
                f"{origin} has the shape {np.shape(new)}, what it replaces has {old.shape}"
            )
        return new

    return Edit(f"replace by {origin}", replaced)


def load_values(path: Path, most: int | None = None) -> Array:
    """The array in an .npy file, or the only one in an .npz or .safetensors file. Raises
    `UsageError` if the file cannot be read or has several arrays, and if a compressed array would
    unpack to more than 8 bytes for each of `most` values."""
    try:
        if path.suffix == ".npy":
            return np.asarray(np.load(path, "r", allow_pickle=False))
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                found = _one(path, list(arrays))
                unpacked = arrays.zip.getinfo(f"{found}.npy").file_size
                if most is not None and unpacked > 8 * most + _HEADER:
                    raise UsageError(f"{path} has {unpacked:,} bytes, for {most:,} values")
                return np.asarray(arrays[found])
        if path.suffix == ".safetensors":
            need("tensors")
            from safetensors import safe_open

            with safe_open(path, framework="numpy") as file:
                return np.asarray(file.get_tensor(_one(path, list(file.keys()))))
    except UsageError:
        raise
    except Exception as error:  # zipfile's, numpy's and safetensors' own, about a damaged file
        raise UsageError(f"{path} cannot be read: {reason(error)}") from None
    raise UsageError(f"{path}: values must be in an .npy, .npz or .safetensors file")


def _one(path: Path, names: list[str]) -> str:
    if len(names) != 1:
        some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise UsageError(f"{path} has {len(names)} arrays ({some}); give a file with one")
    return names[0]


def change(
    stop: Stop,
    edit: Edit,
    note: Note,
    name: str | None = None,
    part: str | Slice = (),
    address: int | None = None,
) -> None:
    """Change the tensor called `name`, or the node where the compute stopped, or a part of it: a
    slice, also as text (`[3, :8]`); for a single token it may begin with that token's `:` or 0.
    `address` says which tensor, if several have the name.

    It affects the ops that have not run yet. Raises `UsageError`, and changes nothing, for a weight
    (the model file's memory), for integers, and for what is not in memory or does not fit.
    """
    if address is None:
        address = stop.address(name)
    name = stop.node.name if name is None else name
    if tensors.is_weight(tensors.tensor_at(address)):
        raise UsageError(f"{name} is a weight: its memory is the model file's and cannot change")
    values = tensors.read(address)
    if values.dtype.kind != "f":
        raise UsageError(f"{name} holds row numbers; ggml ends the process if one is wrong")
    n_given = part.count(",") + 1 if isinstance(part, str) else len(part)
    # a single token has no dimension of its own; it may be given nevertheless
    whole = values.reshape((1,) * min(4 - values.ndim, n_given - values.ndim) + values.shape)
    where = tensors.parse_slice(part, whole.shape) if isinstance(part, str) else part
    old = whole[where]
    try:
        with np.errstate(all="ignore"):  # too large a number becomes infinity
            whole[where] = np.broadcast_to(np.asarray(edit.new(old)), old.shape)
    except ValueError:
        raise UsageError(f"{edit.what}: the values do not fit the shape {old.shape}") from None
    tensors.write(address, whole.reshape(values.shape))
    note(
        NOTE,
        {
            "node": name, "step": stop.step, "compute": stop.compute,
            "what": edit.what, "where": _text(where),
        },
    )  # fmt: skip


def _text(where: Slice) -> str:
    def one(item: int | slice) -> str:
        if isinstance(item, int):
            return str(item)
        return ":".join("" if n is None else str(n) for n in (item.start, item.stop))

    return f"[{', '.join(map(one, where))}]" if where else "all"


class Repeated(OfGraph):
    """Makes a change in every compute, at each of the nodes that `choose` finds in a graph."""

    def __init__(
        self,
        choose: Callable[[LiveGraph], Collection[Node]],
        edit: Edit,
        note: Note,
        part: str | Slice = (),
    ) -> None:
        self._choose, self._edit, self._note, self._part = choose, edit, note, part

    def choose(self, graph: LiveGraph) -> Collection[int]:
        return frozenset(node.index for node in self._choose(graph))

    def passed(self, stop: Stop) -> None:
        change(stop, self._edit, self._note, part=self._part)


def ablate_block(layer: int, part: Part, note: Note) -> Repeated:
    """What the attention or the feed-forward block of a layer adds to the stream becomes zero. It
    raises `UsageError` when a computed graph has no such layer or block."""

    def choose(graph: LiveGraph) -> Sequence[Node]:
        outputs = block_outputs(graph, find_residual(graph), layer)
        if part not in outputs:
            raise UsageError(
                f"layer {layer} has no {part} block; it has {', '.join(outputs) or 'none'}"
            )
        return outputs[part]

    return Repeated(choose, zero(), note)


def ablate_head(layer: int, head: int, note: Note) -> Repeated:
    """What a head of a layer's attention gives to the output projection becomes zero. It raises
    `UsageError` when a computed graph has no such layer or head."""
    axis = 1  # of ggml's dimensions, the heads
    shape: tuple[int, ...] = ()

    def choose(graph: LiveGraph) -> Sequence[Node]:
        nonlocal axis, shape
        node = attention_node(graph, layer)
        axis = 2 if node.op == "SOFT_MAX" else 1
        if node.op == "SOFT_MAX":
            node = next(
                found for found in graph.nodes[node.index + 1 :]
                if found.op == "MUL_MAT" and node.index in [source.node for source in found.sources]
            )  # fmt: skip
        shape, heads = tuple(node.ne[::-1]), node.ne[axis]
        if not 0 <= head < heads:
            raise UsageError(f"layer {layer} has no head {head}; its heads are 0 to {heads - 1}")
        return [node]

    def without(values: Array) -> Array:
        new = values.reshape(shape).copy()
        np.moveaxis(new, 3 - axis, 0)[head] = 0
        return np.asarray(new.reshape(values.shape))

    return Repeated(choose, Edit(f"zero head {head}", without), note)


class AblatedLayer(OfGraph):
    """A layer's output becomes its input: the stream bypasses the layer."""

    def __init__(self, layer: int, note: Note) -> None:
        self._layer, self._note = layer, note
        self._before: Array | None = None

    def choose(self, graph: LiveGraph) -> Collection[int]:
        """The stream before and after the layer. Raises `UsageError` if there is no such layer."""
        residual = find_residual(graph)
        block_outputs(graph, residual, self._layer)
        return residual.before(self._layer).index, residual.after[self._layer].index

    def passed(self, stop: Stop) -> None:
        values, numbers = stop.by_token()
        if stop.node.index == min(self.nodes):
            self._before = values
            return
        assert self._before is not None
        values = self._before[numbers].reshape(stop.node.shape)
        change(stop, replace(values, f"the input of layer {self._layer}"), self._note)
