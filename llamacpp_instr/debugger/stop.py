"""Stops the computes of this process at breakpoints and after single ops.

A breakpoint is one line of words: a pattern of tensor names (`*`, `?`, `[…]`), `key=value` for
filters, and at the end `if` with a condition: `ffn_out-* layer=3-5 if absmax > 60`.

A compute stops *after* an op: its result is ready, and what follows has not run. The thread that
computes calls `Debugger.on_stop` with a `Stop` and goes on when that returns. `debug` is the same
for a program that uses llama_cpp: the public `llamacpp_instr.debug`.
"""

from __future__ import annotations

import enum
import itertools
import os
import queue
import re
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import InstrError, UsageError, reason
from llamacpp_instr.base.patterns import name_matches
from llamacpp_instr.debugger.graph import LiveGraph, Node, Rows, Ubatch, token_numbers
from llamacpp_instr.debugger.tensors import ON_COMPUTE, ON_NODE, Array, Condition, Info, ggml, read
from llamacpp_instr.log.graph.ops import BLOCKS
from llamacpp_instr.recording.session import Recording, begin_session

GRAPHS_KEPT = 8
_RANGES = ("layer", "step", "token")
_KEYS = ("op", "block", *_RANGES, "hits")


@dataclass
class Breakpoint:
    """Where a compute stops; `hits` counts how often it was reached and the condition held."""

    text: str
    pattern: str
    op: str | None = None
    block: str | None = None
    ranges: dict[str, range] = field(default_factory=dict)
    condition: Condition | None = None
    from_hit: int = 1
    """the first hit that stops"""
    sources: tuple[str, ...] = ()
    """names of what the node reads, if others have its name and op"""
    hits: int = 0
    number: int = 0
    once: bool = False
    """removed after it has stopped a compute"""

    @classmethod
    def parse(cls, text: str) -> Breakpoint:
        """Raises `UsageError` for a word that is not understood."""
        place, _, condition = f" {text} ".partition(" if ")
        try:
            words = shlex.split(place)
        except ValueError as error:
            raise UsageError(f"breakpoint {text!r}: {error}") from None
        names = [word for word in words if "=" not in word]
        self = cls(text.strip(), " ".join(names) if names else "*")
        for key, _, value in (word.partition("=") for word in words if "=" in word):
            if key in _RANGES:
                self.ranges[key] = _range(text, key, value)
            elif key == "op":
                self.op = value.upper()
            elif key == "block":
                if value not in BLOCKS:
                    raise UsageError(f"breakpoint {text!r}: block is one of {', '.join(BLOCKS)}")
                self.block = value
            elif key == "hits":
                self.from_hit = _range(text, key, value).start
            else:
                raise UsageError(f"breakpoint {text!r}: {key!r} is not one of {', '.join(_KEYS)}")
        if condition.strip():
            self.condition = Condition.parse(condition.strip())
        elif not words:
            raise UsageError("a breakpoint needs a pattern, a filter or a condition")
        return self

    def applies(self, step: int, positions: frozenset[int]) -> bool:
        """Whether a compute of this step and of tokens at these positions can stop here."""
        of_step, of_token = self.ranges.get("step"), self.ranges.get("token")
        return (of_step is None or step in of_step) and (
            of_token is None or any(position in of_token for position in positions)
        )

    def matches(self, node: Node) -> bool:
        """Whether a node is one of those where it stops."""
        layers = self.ranges.get("layer")
        return (
            node.runs
            and (self.op is None or node.op == self.op)
            and (self.block is None or node.block == self.block)
            and (layers is None or node.layer in layers)
            and name_matches(node.name, self.pattern)
            and (not self.sources or self.sources == node.reads)
        )

    def reached(self, values: Callable[[], Array]) -> bool:
        """Counts a hit, and returns whether to stop. `values` reads the node's."""
        if self.condition is not None and not self.condition.holds(values()):
            return False
        self.hits += 1
        return self.hits >= self.from_hit

    def check(self, graph: LiveGraph) -> None:
        """Raises `UsageError`, with the nearest names, if no node of the graph can match."""
        if any(self.matches(node) for node in graph.nodes):
            return
        why = graph.why_no_op(self.pattern)
        node = graph.nodes[graph.by_name.get(self.pattern, 0)]
        if node.name == self.pattern and node.runs:  # other filters exclude it
            why = f"; it is {node}"
        raise UsageError(f"breakpoint {self.text!r}: no op of the graph matches{why}")


def _range(text: str, key: str, value: str) -> range:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", value)
    if not match:
        raise UsageError(f"breakpoint {text!r}: {key} is a number or a range like 3-5")
    first = int(match[1])
    return range(first, int(match[2] or first) + 1)


class Go(enum.Enum):
    """How a compute goes on: to the next breakpoint, or to the end of the next op, block, layer or
    compute, whichever comes first."""

    ON = "continue"
    OP = "op"
    BLOCK = "block"
    LAYER = "layer"
    DECODE = "decode"
    QUIT = "quit"
    """end the compute; llama.cpp reports that it was aborted"""


PARTS: dict[Go, Callable[[Node], object]] = {
    Go.OP: lambda node: node.index,
    Go.BLOCK: lambda node: (node.layer, node.block),
    Go.LAYER: lambda node: node.layer,
    Go.DECODE: lambda _node: None,
}
"""what the nodes of a single step have in common"""
STEPS = {go.value: go for go in PARTS}
"""single steps by name"""


@dataclass
class Stop:
    """A compute that waits after `node`; its values are those of this moment."""

    graph: LiveGraph
    node: Node
    why: str
    step: int
    compute: int
    n_tokens: int
    ubatch: Ubatch
    """the tokens of the compute"""
    hit: Sequence[Breakpoint] = field(default_factory=tuple)
    go: Go = Go.ON
    """how to go on, for those who set it here"""
    over: bool = False
    """the compute has gone on: nothing can be read any more"""

    def address(self, name: str | None = None) -> int:
        """The tensor called `name`, or the node's own; only while its value is in memory. Of
        several with the same name, the last one computed. Raises `UsageError` if there is none, if
        it has not been computed yet, or if a later op has used its memory."""
        if self.over:
            raise UsageError("the compute has gone on; nothing can be read any more")
        if name is None or name == self.node.name:
            return self.node.address
        graph, at = self.graph, self.node.index
        index = graph.by_name.get(name)
        if index is not None and index > at:
            ran = (node.index for node in graph.nodes[: at + 1] if node.runs and node.name == name)
            index = max(ran, default=index)
        found = graph.addresses[index] if index is not None else graph.leafs.get(name)
        if found is None:
            raise UsageError(f"the graph has no tensor {name!r}{graph.nearest(name)}")
        if index is not None and index > at:
            raise UsageError(f"{name} has not been computed yet; run to it first")
        if not graph.intact(found, at):
            raise UsageError(
                f"{name} is gone: a later op uses its memory; stop at it to see its values"
            )
        return found

    def values(self, name: str | None = None) -> Array:
        """A copy of the values of a tensor, or of the node's, tokens first: float32, or integers as
        stored. Raises `UsageError` as `address` does, and for weights that ggml has repacked."""
        return read(self.address(name))

    def by_token(self) -> tuple[Array, list[int]]:
        """`by_token` of the node, and for each row the number of its token in the ubatch."""
        rows = self.graph.rows[self.node.index]
        values = by_token(self, rows)
        assert rows is not None
        return values, token_numbers(rows, self.ubatch)

    def at_hand(self) -> list[str]:
        """The names of all tensors whose values are in memory, in the order of the graph."""
        graph, at = self.graph, self.node.index
        nodes = [n.name for n in graph.nodes[: at + 1] if graph.intact(n.address, at)]
        return [*(name for name, a in graph.leafs.items() if graph.intact(a, at)), *nodes]


def by_token(stop: Stop, rows: Rows | None) -> Array:
    """(rows, values of a row) of the node, whatever its dimensions are. Raises `UsageError` if
    `rows` are not its outermost dimension, or None."""
    ne = stop.node.ne
    if rows is None or prod(ne[rows.axis + 1 :]) != 1:
        raise UsageError(f"{stop.node.name}: its rows are not tokens")
    return stop.values().reshape(ne[rows.axis], prod(ne[: rows.axis]))


class Follower(Protocol):
    """Sees nodes as they are computed, and may read and change values, but stops nothing."""

    def wants(self, graph: LiveGraph, ubatch: Ubatch) -> Collection[int]:
        """The nodes that it sees of a compute that begins."""

    def passed(self, stop: Stop) -> None:
        """One of them was computed."""


class OfGraph(ABC):
    """A follower of nodes that depend on the graph alone."""

    graph: LiveGraph | None = None
    """the latest"""
    nodes: Collection[int] = ()

    @abstractmethod
    def choose(self, graph: LiveGraph) -> Collection[int]:
        """The nodes that it sees of a graph."""

    def wants(self, graph: LiveGraph, _ubatch: Ubatch) -> Collection[int]:
        """Raises what `choose` raises."""
        if graph is not self.graph:
            self.nodes, self.graph = self.choose(graph), graph
        return self.nodes


_Followed = list[tuple[Follower, Collection[int]]]
_Self = TypeVar("_Self", bound="Debugger")


class Debugger:
    """Breakpoints of this process, and what happens at a stop. `on_stop` is called at each stop, in
    the thread that computes; it returns how to go on, None for `Go.ON`. Errors that it raises end
    the compute and are kept in `error`."""

    def __init__(self, on_stop: Callable[[Stop], Go | None]) -> None:
        self.on_stop = on_stop
        self.on_graph: Callable[[LiveGraph], None] = lambda _graph: None
        """called with every graph that is computed for the first time"""
        self.on_step: Callable[[int], None] = lambda _step: None
        self.breakpoints: list[Breakpoint] = []
        self.followers: list[Follower] = []
        """called in this order, before breakpoints are looked at"""
        self.witnesses: list[Follower] = []
        """called last, when the compute goes on: they see what a stop has changed"""
        self.changes = 0
        """changes that were made at stops, or are made in every compute from now on"""
        self.error: BaseException | None = None
        self.go = Go.ON
        self.graph: LiveGraph | None = None
        """the graph of the latest compute"""
        self.ubatch = Ubatch(0, None, None, None)
        """its tokens"""
        self.step = -1
        self.context = 0
        """the `llama_context *` of the latest compute"""
        self.numbers = itertools.count(1)
        """of breakpoints"""
        self._compute: tuple[LiveGraph, Info] | None = None
        self._active: list[Breakpoint] = []
        self._matched: NDArray[np.uint8] | None = None
        """the nodes of the compute that match one of these; None before the first stop in it"""
        self._followed: _Followed = []
        self._witnessed: _Followed = []
        self._target = -1
        self._stopped: Stop | None = None
        self._graphs: dict[int, LiveGraph] = {}
        # ggml keeps the addresses
        self._callbacks = ON_COMPUTE(self._on_compute), ON_NODE(self._on_node)

    def __enter__(self: _Self) -> _Self:
        """Follow the computes of this process. When the block begins or ends, none may run."""
        ggml().llama_instr_debug(*self._callbacks)
        return self

    def __exit__(self, *_: object) -> None:
        """Raises what has ended a compute, if an error did."""
        ggml().llama_instr_debug(ON_COMPUTE(0), ON_NODE(0))
        error, self.error = self.error, None
        if isinstance(error, (InstrError, KeyboardInterrupt)):
            raise error
        if error is not None:
            raise InstrError(f"the debugger stopped: {reason(error)}") from error

    def add(self, text: str, *, once: bool = False) -> Breakpoint:
        """A new breakpoint, such as `ffn_out-* if absmax > 60`. Raises `UsageError` if it is not
        understood, or matches no op of the graph that was computed last."""
        point = Breakpoint.parse(text)
        if self.graph is not None:
            point.check(self.graph)
        point.once = once
        return self.put(point)

    def put(self, point: Breakpoint) -> Breakpoint:
        """Add a breakpoint, with a number if it has none, whether or not an op matches it. While a
        compute runs, it takes effect from the next one on."""
        point.number = point.number or next(self.numbers)
        self.breakpoints = [*self.breakpoints, point]
        return point

    def remove(self, number: int) -> None:
        """Remove a breakpoint by its number. Raises `UsageError` if there is none."""
        if all(point.number != number for point in self.breakpoints):
            raise UsageError(f"there is no breakpoint {number}")
        self.discard(number)

    def discard(self, number: int) -> None:
        """Remove a breakpoint, if it still exists."""
        self.breakpoints = [point for point in self.breakpoints if point.number != number]

    def follow(self, follower: Follower) -> bool:
        """Let a follower see the computes from the next one on, and the one that is stopped unless
        a node that it wants has passed; returns whether it sees that one. Raises what the follower
        raises if it does not fit the graph, and then does not add it."""
        stop, now = self._stopped, False
        if stop is not None:
            nodes = follower.wants(stop.graph, stop.ubatch)
            now = all(index >= stop.node.index for index in nodes)
            if now:
                self._followed.append((follower, nodes))
                _pass([(follower, nodes)], stop)
        self.followers.append(follower)
        return now

    # --- in the thread that computes ---

    def _on_compute(self, info: Any) -> None:
        try:
            # the caller's struct is gone afterwards, what it points to stays until the compute ends
            self._begin(Info.from_buffer_copy(info.contents))
        except BaseException as error:  # nothing may leave a callback of ctypes
            self.error, self.go = error, Go.QUIT
            for i in range(info.contents.n_nodes):  # so that the compute ends at the first op
                info.contents.wanted[i] = 1

    def _on_node(self, index: int) -> int:
        try:
            if self.error is None:
                self._reach(index)
        except BaseException as error:
            self.error, self.go = error, Go.QUIT
        return int(self.go is Go.QUIT)

    def _begin(self, info: Info) -> None:
        self._target = -1
        graph = self._graphs.pop(info.graph_id, None)
        is_new = graph is None or not graph.is_at(info)
        if graph is None or is_new:
            graph = LiveGraph(info)
        self._graphs[info.graph_id] = graph
        while len(self._graphs) > GRAPHS_KEPT:
            del self._graphs[next(iter(self._graphs))]
        self._compute = graph, info
        self.graph, self.step, self.context = graph, int(info.step), int(info.ctx)
        self.ubatch = graph.ubatch(int(info.n_tokens))
        self.on_step(self.step)
        if is_new:
            self.on_graph(graph)
        self._followed = [(of, of.wants(graph, self.ubatch)) for of in self.followers]
        self._witnessed = [(of, of.wants(graph, self.ubatch)) for of in self.witnesses]
        self._matched = None
        self._want(-1)

    def _want(self, at: int) -> None:
        """Marks the nodes after `at` that may stop."""
        assert self._compute is not None
        graph, info = self._compute
        wanted = np.ctypeslib.as_array(info.wanted, (info.n_nodes,))
        known = self.ubatch.positions
        positions = frozenset(map(int, known)) if known is not None else frozenset()
        active = [point for point in self.breakpoints if point.applies(self.step, positions)]
        if self._matched is None or active != self._active:
            matches = (any(point.matches(node) for point in active) for node in graph.nodes)
            self._matched = np.fromiter(matches, np.uint8, len(graph.nodes))
        self._active = active
        self._target = self._end_of(graph, at)
        wanted[at + 1 :] = self._matched[at + 1 :]
        others = itertools.chain(*(nodes for _, nodes in (*self._followed, *self._witnessed)))
        wanted[[index for index in (*others, self._target) if index > at]] = 1

    def _end_of(self, graph: LiveGraph, at: int) -> int:
        """The node where a single step ends, -1 if none does in this compute."""
        part = PARTS.get(self.go)
        if part is None:
            return -1
        rest = [node for node in graph.nodes[at + 1 :] if node.runs]
        if not rest:
            return -1
        first = part(rest[0])
        *_, last = itertools.takewhile(lambda node: part(node) == first, rest)
        return last.index

    def _reach(self, index: int) -> None:
        assert self._compute is not None
        graph, info = self._compute
        node = graph.nodes[index]
        stop = Stop(graph, node, "", self.step, int(info.compute), int(info.n_tokens), self.ubatch)
        try:
            _pass(self._followed, stop)
            self._stop(stop)
            _pass(self._witnessed, stop)
        finally:
            stop.over = True

    def _stop(self, stop: Stop) -> None:
        node = stop.node
        hit = [
            point
            for point in self._active
            if point.matches(node) and point.reached(lambda: read(node.address))
        ]
        if not hit and node.index != self._target:
            return
        stop.hit = hit
        stop.why = f"breakpoint {hit[0].number}: {hit[0].text}" if hit else f"step: {self.go.value}"
        self.breakpoints = [
            point for point in self.breakpoints if not (point.once and point in hit)
        ]
        self._stopped = stop
        self.go = self.on_stop(stop) or Go.ON
        self._stopped = None
        if self.go is not Go.QUIT:
            self._want(node.index)


def _pass(followed: _Followed, stop: Stop) -> None:
    for follower, nodes in followed:
        if stop.node.index in nodes:
            follower.passed(stop)


class Debugging(Debugger):
    """A session whose computes can be stopped; `debug` returns one. Use it in a `with` block. Its
    `on_stop` is called while `run` is not used."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(lambda _stop: None)
        self.debugger: Debugger = self
        self.recording = recording
        """the session; its log says that it is perturbed"""
        self.result: Any = None
        """what the function that `run` ran to its end returned"""

    def run(self, function: Callable[[], Any]) -> Iterator[Stop]:
        """Run `function` in another thread and yield each stop; the compute waits meanwhile.

        Set `stop.go` to choose how it goes on (`Go.OP`, `Go.LAYER`, …); otherwise it goes on to the
        next breakpoint. `result` then has what the function returned. Raises what it raised. If the
        loop is left early, the function runs to its end without stops.
        """
        stops: queue.SimpleQueue[Stop | None] = queue.SimpleQueue()
        go: queue.SimpleQueue[Go] = queue.SimpleQueue()
        failed: list[BaseException] = []

        def wait(stop: Stop) -> Go:
            stops.put(stop)
            return go.get()

        def work() -> None:
            try:
                self.result = function()
            except BaseException as error:  # raised again by the thread that waits
                failed.append(error)
            finally:
                stops.put(None)

        before, self.on_stop = self.on_stop, wait
        thread = threading.Thread(target=work, name="debugged", daemon=True)
        thread.start()
        stop = stops.get()
        try:
            while stop is not None:
                yield stop
                go.put(stop.go)
                stop = stops.get()
        finally:
            self.on_stop = before
            if stop is not None:
                self.go = Go.ON
                go.put(Go.ON)
            thread.join()
        if failed and self.error is None:
            raise failed[0]

    def __exit__(self, *_: object) -> None:
        try:
            super().__exit__()
        finally:
            self.recording.__exit__()


def debug(
    log: str | os.PathLike[str] = "debug.log", level: str = "detailed", force: bool = False
) -> Debugging:
    """Begin a session in which computes can be stopped: `with llamacpp_instr.debug() as d:`.

    `log`, `level` and `force` are as in `record`. Raises `UsageError` for a wrong argument or a log
    that cannot be opened, `NativeError` without the patched library. Begin it before the first
    decode, and while no other session is open.
    """
    return Debugging(begin_debugged(Path(log), force, "force=True", level))


def begin_debugged(log: Path, force: bool, force_option: str, level: str = "detailed") -> Recording:
    """A session whose log says that it is debugged; arguments and errors as for `begin_session`."""
    return begin_session(
        log, level=level, stats=None, args={}, force=force, force_option=force_option,
        stop_on_nan=False, on_log_error="continue", debugged=True,
    )  # fmt: skip
