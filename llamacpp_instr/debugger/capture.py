"""Values of chosen nodes, a row for each token: kept by position, put into another run (activation
patching), or streamed to shards in safetensors' format.

A shard holds the tokens of some computes, `tokens` and `positions`, and for each node a matrix with
a row for each of them. Memory is bounded by the size of a shard. Invariant: every file of the
directory is whole, and the index names only existing files, even after a run that ended early.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llamacpp_instr.base.errors import InstrError, UsageError, reason
from llamacpp_instr.base.output import check_output_directory, file_mode, open_output
from llamacpp_instr.base.patterns import name_matches
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.debugger.changes import Note, change, replace
from llamacpp_instr.debugger.graph import LiveGraph, Node, Ubatch
from llamacpp_instr.debugger.stop import Debugger, Go, OfGraph, Stop
from llamacpp_instr.debugger.tensors import Array
from llamacpp_instr.log.graph.ops import VIEW_OPS

INDEX = "index.json"
SHARD_BYTES = 128 << 20  # values in a shard, or those of one ubatch if they are more

_SHARD = re.compile(r"shard-\d{5,}\.safetensors")


def matching(graph: LiveGraph, pattern: str) -> list[Node]:
    """The nodes whose names match a pattern (`ffn_out-*`); of several with the same name, the last.
    Raises `UsageError`, which says why, if there is none."""
    found = [
        graph.nodes[index]
        for name, index in graph.by_name.items()
        # a node without rows in this compute, which wants no logits, has some in another
        if graph.nodes[index].op not in VIEW_OPS and name_matches(name, pattern)
    ]
    if not found:
        raise UsageError(f"no op of the graph matches {pattern!r}{graph.why_no_op(pattern)}")
    return sorted(found, key=lambda node: node.index)


class ByToken(OfGraph):
    """A follower of the nodes of a pattern, each with a row for each token, in every compute."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def choose(self, graph: LiveGraph) -> Collection[int]:
        """Raises `UsageError` if no node matches, or if one lacks a row for each token."""
        nodes = matching(graph, self.pattern)
        for node in nodes:
            rows = graph.rows[node.index]
            if rows is None or np.prod(node.ne[rows.axis + 1 :]) != 1:
                raise UsageError(f"{node}: it does not have a row for each token")
        return [node.index for node in nodes]

    def by_position(self, stop: Stop) -> tuple[Array, list[int]]:
        """(rows, values of a row) of the node, and the position of each row's token."""
        positions = stop.ubatch.positions
        if positions is None:
            raise UsageError("this model's graph does not name the positions of its tokens")
        values, numbers = stop.by_token()
        return values, [int(position) for position in positions[numbers]]


class CollectedLogits:
    """A witness that keeps the last row of what each compute gives: a token is sampled from it."""

    def __init__(self) -> None:
        self.rows: list[Array] = []
        """(vocabulary,) float32 each"""

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """The last op."""
        return [max((node.index for node in graph.nodes if node.runs), default=-1)]

    def passed(self, stop: Stop) -> None:
        """Computes of a prompt's first parts give no logits."""
        values = stop.values()
        if values.size:
            self.rows.append(np.atleast_2d(values)[-1].copy())


class Captured(ByToken):
    """Keeps the values by position, during the run that they are taken from. A position that is
    computed again gets its latest values."""

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern)
        self.values: dict[str, dict[int, Array]] = {}
        """a row by node and position"""

    def passed(self, stop: Stop) -> None:
        values, positions = self.by_position(stop)
        of_node = self.values.setdefault(stop.node.name, {})
        of_node.update((at, row.copy()) for at, row in zip(positions, values, strict=True))


class Patch(ByToken):
    """Puts captured values into nodes of the same names, at the same positions or some of them."""

    def __init__(
        self, captured: Captured, note: Note, positions: Container[int] | None = None
    ) -> None:
        super().__init__(captured.pattern)
        self._captured, self._note, self._positions = captured.values, note, positions

    def passed(self, stop: Stop) -> None:
        values, positions = self.by_position(stop)
        of_node = self._captured.get(stop.node.name, {})
        known = {
            i: of_node[at]
            for i, at in enumerate(positions)
            if at in of_node and (self._positions is None or at in self._positions)
        }
        if not known:
            return
        for i, row in known.items():
            if row.shape != values[i].shape:
                raise UsageError(
                    f"{stop.node.name}: the captured run has {row.size} values for a token, "
                    f"this one {values[i].size}"
                )
            values[i] = row
        at = [positions[i] for i in known]
        where = f"position {at[0]}" if len(at) == 1 else f"positions {min(at)} to {max(at)}"
        edit = replace(values.reshape(stop.node.shape), f"the captured run at {where}")
        change(stop, edit, self._note)


@dataclass
class _Compute:
    ubatch: Ubatch
    step: int = -1
    values: dict[str, Array] = field(default_factory=dict)
    """by node"""


class Capture(ByToken):
    """Writes the values to shards; `close` writes what is left. Raises `UsageError` if the folder
    has other files, or an older capture without `force`, or if safetensors is not installed."""

    def __init__(
        self, pattern: str, folder: Path, force: bool = False, shard_bytes: int = SHARD_BYTES
    ) -> None:
        super().__init__(pattern)
        need("tensors")
        check_output_directory(folder, _our_names(folder), force)
        self._folder, self._limit = folder, shard_bytes
        self._shards: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._computes: list[_Compute] = []
        """that the next shard holds, each with the nodes of these names"""
        self._of_outputs: set[str] = set()
        self._size = self.n_tokens = 0
        """captured so far"""

    def wants(self, graph: LiveGraph, ubatch: Ubatch) -> Collection[int]:
        """Begins a compute. Raises `UsageError` as `ByToken` does."""
        try:
            wanted = super().wants(graph, ubatch)
        except UsageError:
            if graph.is_encoder:  # its decoder may have such nodes
                return ()
            raise
        names = [graph.nodes[index].name for index in wanted]
        if self._size >= self._limit or names != self._names:
            self._flush()
            self._names = names
        self._computes.append(_Compute(ubatch))
        return wanted

    def passed(self, stop: Stop) -> None:
        name, (values, numbers) = stop.node.name, stop.by_token()
        if len(values) != len(numbers):
            raise UsageError(f"{stop.node}: it does not have a row for each token")
        rows = stop.graph.rows[stop.node.index]
        if rows is not None and rows.of == "outputs":
            self._of_outputs.add(name)
        first = self._computes[0].values.get(name, values)
        if first.shape[1] != values.shape[1]:
            raise UsageError(f"{stop.node}: its rows do not keep their length")
        self._computes[-1].step = stop.step
        self._computes[-1].values[name] = values
        self._size += values.nbytes

    def close(self, complete: bool = True) -> None:
        """Write the last shard and the index, which says whether the run was complete."""
        self._flush()
        if self._shards:
            self._write_index(complete)

    def _flush(self) -> None:
        """Write a shard of what has been captured since the last one."""
        # a compute that was ended has a part of its nodes
        computes = [of for of in self._computes if len(of.values) == len(self._names)]
        self._computes, self._size = [], 0
        if computes:
            tensors = _inputs_of(computes)
            for name in self._names:
                tensors[name] = np.concatenate([of.values.pop(name) for of in computes])
            self._write(tensors)

    def _write(self, tensors: dict[str, Array]) -> None:
        if not self._shards:
            self._folder.mkdir(exist_ok=True)
            for name in _our_names(self._folder):
                (self._folder / name).unlink(missing_ok=True)
        file = f"shard-{len(self._shards):05}.safetensors"
        with open_output(self._folder / file) as out:
            _save(tensors, out.name)  # the hidden file that gets the name when it is whole
        nodes = {name: list(values.shape) for name, values in tensors.items()}
        self._shards.append({"file": file, "tensors": nodes})
        self.n_tokens += len(tensors["tokens"])
        self._write_index(complete=False)

    def _write_index(self, complete: bool) -> None:
        index = {
            "format": "llamacpp-instr capture 1",
            "pattern": self.pattern,
            "complete": complete,
            "tokens": self.n_tokens,
            "rows_of_outputs": sorted(self._of_outputs),
            "shards": self._shards,
        }
        with open_output(self._folder / INDEX, force=True) as out:
            out.write(json.dumps(index, indent=1).encode() + b"\n")


@contextmanager
def capturing(
    pattern: str, folder: Path, force: bool, notice: Callable[[str], None]
) -> Iterator[Debugger]:
    """A debugger for `run` that never stops: the values of all nodes of `pattern` go to `folder`.
    `notice` is called at the end with what was captured, even if an error ended the run. Raises
    `UsageError` as `Capture` does, and if a node lacks a row for each token."""
    capture = Capture(pattern, folder, force)
    debugger = Debugger(lambda _stop: Go.ON)
    debugger.followers.append(capture)
    complete = False
    try:
        yield debugger
        complete = True
    finally:
        capture.close(complete)
        if capture.n_tokens:
            notice(f"captured: {folder}, {counted(capture.n_tokens, 'token')}")


def _inputs_of(computes: Sequence[_Compute]) -> dict[str, Array]:
    """What a shard says about its tokens; -1 where the graph does not have it."""
    columns: dict[str, list[Array]] = {"tokens": [], "positions": [], "steps": [], "outputs": []}
    begin = 0
    for of in computes:
        ubatch, n = of.ubatch, of.ubatch.n_tokens
        unknown = np.full(n, -1)
        columns["tokens"].append(unknown if ubatch.tokens is None else ubatch.tokens)
        columns["positions"].append(unknown if ubatch.positions is None else ubatch.positions)
        columns["steps"].append(np.full(n, of.step))
        outputs = np.arange(n) if ubatch.outputs is None else ubatch.outputs
        columns["outputs"].append(begin + outputs)
        begin += n
    return {name: np.concatenate(parts).astype(np.int32) for name, parts in columns.items()}


def _our_names(folder: Path) -> set[str]:
    """The files of an older capture, which a new one may replace."""
    mode = file_mode(folder)
    if mode is None or not stat.S_ISDIR(mode):
        return {INDEX}
    return {INDEX, *(path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name))}


def _save(tensors: dict[str, Array], path: str) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    mode = Path(path).stat().st_mode
    try:
        save_file(tensors, path)
        Path(path).chmod(mode)  # the library makes a file that only its owner can read
    except SafetensorError as error:
        raise InstrError(f"a shard of the capture cannot be written: {reason(error)}") from None
