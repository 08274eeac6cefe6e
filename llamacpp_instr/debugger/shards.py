"""Streams the values of chosen nodes of a whole run to shards in safetensors' format.

A shard holds the tokens of some computes, `tokens` and `positions`, and for each node a matrix with
a row for each of them. Memory is bounded by the size of a shard. Invariant: every file of the
directory is whole, and the index names only files that are; a run that ends early leaves those.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from llamacpp_instr.base.errors import InstrError, UsageError, reason
from llamacpp_instr.base.output import check_output_directory, file_mode, open_output
from llamacpp_instr.base.system import need
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.graph import LiveGraph, Ubatch
from llamacpp_instr.debugger.patching import ByToken
from llamacpp_instr.debugger.rows import token_numbers
from llamacpp_instr.debugger.stop import Go, Stop
from llamacpp_instr.debugger.tensors import Array

INDEX = "index.json"
SHARD_BYTES = 128 << 20
"""values in a shard, or those of one ubatch if they are more"""

_SHARD = re.compile(r"shard-\d{5,}\.safetensors")


class Capture(ByToken):
    """Writes the values of all nodes of a pattern, of every compute; a follower of a `Debugger`.

    `close` writes what is left. Raises `UsageError` if the directory holds other files, or an older
    capture and `force` is not set, or if safetensors is not installed.
    """

    def __init__(
        self, pattern: str, folder: Path, force: bool = False, shard_bytes: int = SHARD_BYTES
    ) -> None:
        super().__init__(pattern)
        self._save = _load_save()
        check_output_directory(folder, _our_names(folder), force)
        self._folder, self._force, self._limit = folder, force, shard_bytes
        self._shards: list[dict[str, Any]] = []
        self._inputs: list[Ubatch] = []
        self._steps: list[int] = []
        self._names: list[str] = []
        self._values: dict[str, list[Array]] = {}
        self._of_outputs: set[str] = set()
        self._size = 0
        self.n_tokens = 0
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
        self._inputs.append(ubatch)
        self._steps.append(-1)
        return wanted

    def passed(self, stop: Stop) -> None:
        name = stop.node.name
        values, rows = self.rows(stop)
        if len(values) != len(token_numbers(rows, stop.ubatch)):
            raise UsageError(f"{stop.node}: it has no row for each token")
        if rows.of == "outputs":
            self._of_outputs.add(name)
        self._steps[-1] = stop.step
        of_node = self._values.setdefault(name, [])
        if of_node and of_node[0].shape[1] != values.shape[1]:
            raise UsageError(f"{stop.node}: its rows do not keep their length")
        of_node.append(values)
        self._size += values.nbytes

    def close(self, complete: bool = True) -> None:
        """Write the last shard and the index, which says whether the run was complete."""
        self._flush()
        if self._shards:
            self._write_index(complete)

    def _flush(self) -> None:
        """Write a shard of what has been captured since the last one."""
        # a compute that was ended has a part of its nodes
        n_computes = min((len(self._values.get(name, ())) for name in self._names), default=0)
        if n_computes:
            self._write(n_computes)
        self._values, self._inputs, self._steps, self._size = {}, [], [], 0

    def _write(self, n_computes: int) -> None:
        if not self._shards:
            self._prepare()
        tensors = self._inputs_of(self._inputs[:n_computes], self._steps[:n_computes])
        for name in self._names:
            tensors[name] = np.concatenate(self._values.pop(name)[:n_computes])
        file = f"shard-{len(self._shards):05}.safetensors"
        with open_output(self._folder / file) as out:
            self._save(tensors, out.name)  # the hidden file that gets the name when it is whole
        nodes = {name: list(values.shape) for name, values in tensors.items()}
        self._shards.append({"file": file, "tensors": nodes})
        self.n_tokens += len(tensors["tokens"])
        self._write_index(complete=False)

    def _inputs_of(self, ubatches: Sequence[Ubatch], steps: Sequence[int]) -> dict[str, Array]:
        counts = [ubatch.n_tokens for ubatch in ubatches]
        begins = np.cumsum([0, *counts])

        def column(of: Sequence[Array | None]) -> Array:
            parts = [
                np.full(n, -1) if values is None else values
                for n, values in zip(counts, of, strict=True)
            ]
            return np.concatenate(parts).astype(np.int32)

        outputs = [
            begin + (ubatch.outputs if ubatch.outputs is not None else np.arange(ubatch.n_tokens))
            for begin, ubatch in zip(begins, ubatches, strict=False)
        ]
        return {
            "tokens": column([ubatch.tokens for ubatch in ubatches]),
            "positions": column([ubatch.positions for ubatch in ubatches]),
            "steps": np.repeat(steps, counts).astype(np.int32),
            "outputs": np.concatenate(outputs).astype(np.int32),
        }

    def _prepare(self) -> None:
        self._folder.mkdir(exist_ok=True)
        for name in _our_names(self._folder):
            (self._folder / name).unlink(missing_ok=True)

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
    `notice` is called at the end with what was captured, also if an error ended the run.

    Raises `UsageError` as `Capture` does, and if a node has no row for each token.
    """
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


def _our_names(folder: Path) -> set[str]:
    """The files of an older capture, which a new one may replace."""
    mode = file_mode(folder)
    if mode is None or not stat.S_ISDIR(mode):
        return {INDEX}
    return {INDEX, *(path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name))}


def _load_save() -> Callable[[dict[str, Array], str], None]:
    need("tensors")
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    def save(tensors: dict[str, Array], path: str) -> None:
        mode = Path(path).stat().st_mode
        try:
            save_file(tensors, path)
            Path(path).chmod(mode)  # the library makes a file that only its owner reads
        except SafetensorError as error:
            raise InstrError(f"a shard of the capture cannot be written: {reason(error)}") from None

    return save
