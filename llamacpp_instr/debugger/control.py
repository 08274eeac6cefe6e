"""Stops the computes of this process at breakpoints and after single ops.

A compute stops *after* an op: its result is there, and what follows has not run. The thread that
computes calls `on_stop` and goes on when that returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np

from llamacpp_instr.base.errors import InstrError, UsageError, reason
from llamacpp_instr.debugger.ggml import ON_COMPUTE, ON_NODE, Info, ggml
from llamacpp_instr.debugger.graph import LiveGraph, Node, Ubatch
from llamacpp_instr.debugger.points import Breakpoint
from llamacpp_instr.debugger.stop import Go, Stop
from llamacpp_instr.debugger.tensors import read

GRAPHS_KEPT = 8


class Follower(Protocol):
    """Sees nodes as they are computed, and may read and change values, but stops nothing."""

    def wants(self, graph: LiveGraph, ubatch: Ubatch) -> Collection[int]:
        """The nodes that it sees of a compute that begins."""

    def passed(self, stop: Stop) -> None:
        """One of them was computed."""


class Debugger:
    """Breakpoints of this process, and what happens at a stop.

    `on_stop` is called at each stop, in the thread that computes; it returns how to go on. Errors
    that it raises end the compute and are kept in `error`.
    """

    def __init__(self, on_stop: Callable[[Stop], Go]) -> None:
        self.on_stop = on_stop
        self.on_graph: Callable[[LiveGraph], None] = lambda _graph: None
        """called with every graph that is computed for the first time"""
        self.on_step: Callable[[int], None] = lambda _step: None
        self.breakpoints: list[Breakpoint] = []
        self.followers: list[Follower] = []
        """called in this order, before breakpoints are looked at"""
        self.witnesses: list[Follower] = []
        """called last, when the compute goes on: they see what a stop has changed"""
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
        self._info: Info | None = None
        self._active: list[Breakpoint] = []
        self._followed: list[tuple[Follower, Collection[int]]] = []
        self._witnessed: list[tuple[Follower, Collection[int]]] = []
        self._target = -1
        self._stopped: Stop | None = None
        self._graphs: dict[int, LiveGraph] = {}
        # ggml keeps the addresses
        self._callbacks = ON_COMPUTE(self._on_compute), ON_NODE(self._on_node)

    def __enter__(self) -> Debugger:
        """Follow the computes of this process, as long as the `with` block runs. Nothing may be
        computed when it begins or ends."""
        ggml().llama_instr_debug(*self._callbacks)
        return self

    def __exit__(self, *_: object) -> None:
        """Raises what has ended a compute, if an error did."""
        ggml().llama_instr_debug(ON_COMPUTE(0), ON_NODE(0))
        error, self.error = self.error, None
        if error is None:
            return
        if isinstance(error, (InstrError, KeyboardInterrupt)):
            raise error
        raise InstrError(f"the debugger stopped: {reason(error)}") from error

    def add(self, text: str, *, once: bool = False) -> Breakpoint:
        """A new breakpoint (see `points`). Raises `UsageError` if it is not understood, or if it
        matches no op of the graph that is computed."""
        point = Breakpoint.parse(text)
        if self.graph is not None:
            point.check(self.graph)
        point.once = once
        return self.put(point)

    def put(self, point: Breakpoint) -> Breakpoint:
        """Add a breakpoint, with a number if it has none, whether or not an op matches it. While a
        compute runs it counts from the next one on."""
        point.number = point.number or next(self.numbers)
        self.breakpoints = [*self.breakpoints, point]
        return point

    def remove(self, number: int) -> None:
        """Remove a breakpoint. Raises `UsageError` if there is none with that number."""
        if all(point.number != number for point in self.breakpoints):
            raise UsageError(f"there is no breakpoint {number}")
        self.discard(number)

    def discard(self, number: int) -> None:
        """Remove a breakpoint, if it is still there."""
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
                if stop.node.index in nodes:
                    follower.passed(stop)
        self.followers.append(follower)
        return now

    # --- in the thread that computes ---

    def _on_compute(self, info: Any) -> None:
        try:
            # the caller's struct is gone afterwards, what it points to stays until the compute ends
            self._begin(Info.from_buffer_copy(info.contents))
        except BaseException as error:  # nothing may leave a callback of ctypes
            self.error = error
            self.go = Go.QUIT
            self._want_first(info.contents)

    def _on_node(self, index: int) -> int:
        try:
            if self.error is None:
                self._reach(index)
        except BaseException as error:
            self.error = error
            self.go = Go.QUIT
        return int(self.go is Go.QUIT)

    def _begin(self, info: Info) -> None:
        self._info, self._target = info, -1
        graph = self._graphs.pop(info.graph_id, None)
        is_new = graph is None or not graph.is_at(info)
        if graph is None or is_new:
            graph = LiveGraph(info)
        self._graphs[info.graph_id] = graph
        while len(self._graphs) > GRAPHS_KEPT:
            del self._graphs[next(iter(self._graphs))]
        self.graph, self.step, self.context = graph, int(info.step), int(info.ctx)
        self.ubatch = graph.ubatch(int(info.n_tokens))
        self.on_step(self.step)
        if is_new:
            self.on_graph(graph)
        self._followed = [(of, of.wants(graph, self.ubatch)) for of in self.followers]
        self._witnessed = [(of, of.wants(graph, self.ubatch)) for of in self.witnesses]
        self._want(-1)

    def _want_first(self, info: Info) -> None:
        """Be called after every op, so that the compute ends at the first."""
        for i in range(info.n_nodes):
            info.wanted[i] = 1

    def _want(self, at: int) -> None:
        """Marks the nodes after `at` that may stop."""
        info, graph = self._info, self.graph
        assert info is not None
        assert graph is not None
        wanted = np.ctypeslib.as_array(info.wanted, (info.n_nodes,))
        wanted[at + 1 :] = 0
        known = self.ubatch.positions
        positions = frozenset(map(int, known)) if known is not None else frozenset()
        self._active = [point for point in self.breakpoints if point.applies(self.step, positions)]
        for node in graph.nodes[at + 1 :]:
            if any(point.matches(node) for point in self._active):
                wanted[node.index] = 1
        for _, nodes in (*self._followed, *self._witnessed):
            for index in nodes:
                if index > at:
                    wanted[index] = 1
        self._target = self._end_of(graph, at)
        if self._target >= 0:
            wanted[self._target] = 1

    def _end_of(self, graph: LiveGraph, at: int) -> int:
        """The node where a single step ends, -1 if none does in this compute."""
        rest = [node for node in graph.nodes[at + 1 :] if node.runs]
        if not rest or self.go not in (Go.OP, Go.BLOCK, Go.LAYER, Go.DECODE):
            return -1
        if self.go is Go.OP:
            return rest[0].index
        if self.go is Go.DECODE:
            return rest[-1].index

        def part(node: Node) -> object:
            return node.layer if self.go is Go.LAYER else (node.layer, node.block)

        first, last = part(rest[0]), rest[0]
        for node in rest:
            if part(node) != first:
                break
            last = node
        return last.index

    def _reach(self, index: int) -> None:
        graph, info = self.graph, self._info
        assert graph is not None
        assert info is not None
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
        self.go = self.on_stop(stop)
        self._stopped = None
        if self.go is not Go.QUIT:
            self._want(node.index)


def _pass(followed: list[tuple[Follower, Collection[int]]], stop: Stop) -> None:
    for follower, nodes in followed:
        if stop.node.index in nodes:
            follower.passed(stop)
