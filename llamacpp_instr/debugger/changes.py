"""Changes values while a compute is stopped, and says so in the log.

A change is an `Edit` of the values of a tensor, or of a part of them. `change` makes one at a stop;
`Repeated` makes it again in every compute from then on. Each writes a note `instr.change`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import UsageError, reason
from llamacpp_instr.base.system import need
from llamacpp_instr.debugger.figures import Slice, parse_slice
from llamacpp_instr.debugger.ggml import tensor_at
from llamacpp_instr.debugger.graph import LiveGraph, Node, Ubatch
from llamacpp_instr.debugger.stop import Stop
from llamacpp_instr.debugger.tensors import Array, is_weight, read, write

NOTE = "instr.change"
_HEADER = 1 << 16
"""bytes of the header of an array in a file, at most"""

Note = Callable[[str, Any], None]
"""writes a note into the log: `Recording.note`"""


@dataclass(frozen=True)
class Edit:
    """What a change does to values."""

    what: str
    """in words, for the log"""
    new: Callable[[Array], npt.ArrayLike]
    """the values that come into the place of an array of them; as many, or one for all"""


def set_to(value: float) -> Edit:
    """Every value becomes `value`."""
    return Edit(f"set to {value:g}", lambda _: np.float64(value))


def zero() -> Edit:
    return Edit("zero", lambda _: np.float64(0))


def scale(factor: float) -> Edit:
    """Every value times `factor`."""
    return Edit(f"scale by {factor:g}", lambda values: values * values.dtype.type(factor))


def add_noise(deviation: float, seed: int) -> Edit:
    """Adds normal noise of this standard deviation. The same seed gives the same noise, in every
    compute."""

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


def load_values(path: str | Path, name: str | None = None, most: int | None = None) -> Array:
    """The array in an .npy file, or the one called `name` in an .npz or .safetensors file; the name
    may be left out if there is only one.

    Raises `UsageError` if the file cannot be read or has no such array, and if a compressed array
    would unpack to more than 8 bytes for each of `most` values.
    """
    path = Path(path)
    try:
        if path.suffix == ".npy":
            return np.asarray(np.load(path, "r", allow_pickle=False))
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                found = _one(path, list(arrays), name)
                unpacked = arrays.zip.getinfo(f"{found}.npy").file_size
                if most is not None and unpacked > 8 * most + _HEADER:
                    raise UsageError(f"{path} has {unpacked:,} bytes, for {most:,} values")
                return np.asarray(arrays[found])
        if path.suffix == ".safetensors":
            with open_safetensors(path) as file:
                return np.asarray(file.get_tensor(_one(path, list(file.keys()), name)))
    except UsageError:
        raise
    except Exception as error:  # zipfile's, numpy's and safetensors' own, about a damaged file
        raise UsageError(f"{path} cannot be read: {reason(error)}") from None
    raise UsageError(f"{path}: values come from a file .npy, .npz or .safetensors")


def change(
    stop: Stop,
    edit: Edit,
    note: Note,
    name: str | None = None,
    part: str | Slice = (),
    address: int | None = None,
) -> None:
    """Change the tensor called `name`, or the node where the compute stopped, or a part of it: a
    slice, also as text (`[3, :8]`); one of a single token may begin with `:` or 0 for it. `address`
    says which one, if several have the name.

    It affects the ops that have not run yet. Raises `UsageError` for a weight, which is the model
    file's memory, for integers, for a tensor that is not in memory, and for what does not fit; then
    nothing has changed.
    """
    if address is None:
        address = stop.address(name)
    name = stop.node.name if name is None else name
    if is_weight(tensor_at(address)):
        raise UsageError(f"{name} is a weight: its memory is the model file's and cannot change")
    values = read(address)
    if values.dtype.kind != "f":
        raise UsageError(f"{name} holds numbers of rows; ggml ends the process if one is wrong")
    n_given = part.count(",") + 1 if isinstance(part, str) else len(part)
    # a single token has no dimension of its own; it may be given nevertheless
    whole = values.reshape((1,) * min(4 - values.ndim, n_given - values.ndim) + values.shape)
    where = parse_slice(part, whole.shape) if isinstance(part, str) else part
    old = whole[where]
    try:
        with np.errstate(all="ignore"):  # too large a number becomes infinity
            whole[where] = np.broadcast_to(np.asarray(edit.new(old)), old.shape)
    except ValueError:
        raise UsageError(f"{edit.what}: the values do not fit the shape {old.shape}") from None
    write(address, whole.reshape(values.shape))
    note(
        NOTE,
        {
            "node": name, "step": stop.step, "compute": stop.compute,
            "what": edit.what, "where": _text(where),
        },
    )  # fmt: skip


class Repeated:
    """Makes a change in every compute, at each of the nodes that `choose` finds in a graph; a
    follower of a `Debugger`. `edit` may depend on the stop, and be None for none."""

    def __init__(
        self,
        choose: Callable[[LiveGraph], Collection[Node]],
        edit: Edit | Callable[[Stop], Edit | None],
        note: Note,
        part: str | Slice = (),
    ) -> None:
        self._choose, self._edit, self._note, self._part = choose, edit, note, part
        self._graph: LiveGraph | None = None
        self._nodes: frozenset[int] = frozenset()

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        if graph is not self._graph:
            self._nodes = frozenset(node.index for node in self._choose(graph))
            self._graph = graph
        return self._nodes

    def passed(self, stop: Stop) -> None:
        edit = self._edit if isinstance(self._edit, Edit) else self._edit(stop)
        if edit is not None:
            change(stop, edit, self._note, part=self._part)


def open_safetensors(path: Path) -> Any:
    """A .safetensors file, opened for numpy. Raises `UsageError` without the library."""
    need("tensors")
    from safetensors import safe_open

    return safe_open(path, framework="numpy")


def _one(path: Path, names: list[str], name: str | None) -> str:
    if name is None and len(names) == 1:
        return names[0]
    if name not in names:
        some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        asked = f"no array {name!r}" if name is not None else f"{len(names)} arrays; name one"
        raise UsageError(f"{path} has {asked}; it has {some}")
    return str(name)


def _text(where: Slice) -> str:
    def one(item: int | slice) -> str:
        if isinstance(item, int):
            return str(item)
        first, end = ("" if n is None else str(n) for n in (item.start, item.stop))
        return f"{first}:{end}"

    return f"[{', '.join(map(one, where))}]" if where else "all"
