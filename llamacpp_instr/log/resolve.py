"""Follows the ids of a log: what each event refers to, in bounded memory.

Invariant: an event is whole if it is not before the session, an earlier event assigned every id
that it names, the id can still be named, and its columns fit each other and what they describe.
Every reader and `check` use these rules, so they accept and refuse the same events for the same
reasons. The docstring of `schema` says how long an id can be named; what can no longer be named is
forgotten. Weights are followed if a graph gives them by id alone; `check` checks the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

from msgspec import structs

from llamacpp_instr.base.errors import LogError
from llamacpp_instr.log import schema
from llamacpp_instr.log.columns import call_problems, interval_problems, sequence_problems
from llamacpp_instr.log.devices import RUNS_KEPT, device_ops_problems
from llamacpp_instr.log.graph.experts import Used, experts_problems
from llamacpp_instr.log.graph.kernels import (
    graph_problems,
    is_weight,
    leaf_of,
    plan_problems,
    whole_graph,
)  # fmt: skip
from llamacpp_instr.log.known import (
    KnownCompute,
    KnownContext,
    KnownGraph,
    KnownModel,
    KnownPlan,
    KnownStep,
    clients_context,
)
from llamacpp_instr.log.numbers import Numbers
from llamacpp_instr.log.reader import EventReader

Check: TypeAlias = Callable[[Any], Iterator[str]]
"""why an event is not whole; changes nothing"""
Take: TypeAlias = Callable[[int, Any], None]
"""keeps what later events can name; of an event that is not whole, as far as they can be checked"""
Measured: TypeAlias = (
    "schema.Experts | schema.Layers | schema.Ops | schema.Splits | schema.TensorStats"
)
_SHORT = frozenset((schema.Graph, schema.Plan))
"""events that may be written as their difference from an earlier one"""
Takers: TypeAlias = Mapping[type[schema.Event], Callable[[Any], None]]


class Resolver:
    """Takes the events of one log in order. Its attributes `model` to `mark` are what the latest
    event refers to; those that it does not refer to are of earlier events. The masks of computes
    are followed only with `masks`."""

    model: KnownModel
    context: KnownContext
    graph: KnownGraph
    plan: KnownPlan
    compute: KnownCompute
    """that `experts` to `splits` and `tensor_stats` measure"""
    step: KnownStep | None
    """that a `step_end` ends or a `compute` belongs to"""
    mark: schema.Mark
    """the start of a mark that ends"""

    def __init__(self, masks: bool = True) -> None:
        self.masks = masks
        self.start: schema.SessionStart
        self._begin: int | None = None
        self.left_out = 0
        """events that `follow` left out"""
        self.latest = 0
        """the largest `t` so far, in ns"""
        self.models: dict[int, KnownModel] = {}
        self.contexts: dict[int, KnownContext] = {}
        """the one that was named last is at the end"""
        self.graphs: dict[int, KnownGraph] = {}
        self.plans: dict[int, KnownPlan] = {}
        self.computes: dict[int, KnownCompute] = {}
        self.behind: dict[int, KnownCompute] = {}
        """the latest computes with a part that a device may run behind the caller"""
        self.devices: dict[str, schema.Device] = {}
        """the latest event of each device, by name"""
        self.connections: dict[int, schema.Connection] = {}
        """begun and not ended"""
        self._of_clients = clients_context()
        self._first_compute: int | None = None
        self._part = 1
        self.open_steps: dict[int, KnownStep] = {}
        """begun and not ended"""
        self.open_marks: dict[int, tuple[int, schema.Mark]] = {}
        """with the line; begun and not ended"""
        self._nameable: dict[str, Container[int]] = {
            "model": self.models, "context": self.contexts, "graph": self.graphs,
            "plan": self.plans, "compute": self.computes,
        }  # fmt: skip
        self._given: defaultdict[str, Numbers] = defaultdict(Numbers)
        # the methods with the name of an event are its rules
        self._rules: dict[type[schema.Event], tuple[Check, Take]] = {
            of: (
                getattr(self, f"_check_{schema.event_name(of)}", lambda _event: iter(())),
                getattr(self, f"_take_{schema.event_name(of)}", lambda _line, _event: None),
            )
            for of in schema.EVENTS
        }

    def follow(
        self, reader: EventReader, lenient: bool = False
    ) -> Iterator[tuple[int, schema.Event]]:
        """The line number and the event of every whole event; `start` is the first.

        Raises LogError with the line for an event that is not whole; `lenient` leaves such events
        out, as if the log did not have them, and the reader's `end` counts them.
        """
        events = iter(reader)
        line, event = next(events, (1, None))
        if not isinstance(event, schema.SessionStart):
            raise LogError("its session_start is damaged", reader.path, 1)
        self.take(line, event)
        self.latest = event.t
        yield line, event
        for line, given in events:
            if self._part > 1 and self.is_of_earlier_part(given):
                continue
            event = self.whole(given) if type(given) in _SHORT else given
            problem = next(self.problems(event), None)
            if problem is None:
                self._rules[type(event)][1](line, event)
                if event.t > self.latest:
                    self.latest = event.t
                yield line, event
            elif lenient:
                self.left_out += 1
            else:
                raise LogError(f"{schema.event_name(event)}: {problem}", reader.path, line)
        if self.left_out and reader.end is not None:
            reader.end = replace(reader.end, left_out=self.left_out)

    def feed(self, reader: EventReader, takers: Takers, lenient: bool) -> int:
        """Calls the taker of every whole event; returns how many events were left out (`lenient`).

        Raises as `follow`, also for an event for which its taker raises OverflowError.
        """
        for line, event in self.follow(reader, lenient):
            take = takers.get(type(event))
            try:
                if take is not None:
                    take(event)
            except OverflowError:
                if not lenient:
                    reason = f"{schema.event_name(event)}: impossible tensor sizes"
                    raise LogError(reason, reader.path, line) from None
                self.left_out += 1
        return self.left_out

    def whole(self, event: schema.Event) -> schema.Event:
        """The event; a graph or a plan with all its columns, and a graph with what is known of its
        weights, as far as that is possible: `problems` says why not."""
        try:
            if isinstance(event, schema.Graph):
                return whole_graph(event, self._weights(event.ctx), self.graphs)
            if isinstance(event, schema.Plan) and event.like is not None:
                other = self.plans[event.like].event
                return structs.replace(event, node=other.node, n=other.n, like=None)
        except (KeyError, ValueError):
            pass
        return event

    def problems(self, event: schema.Event) -> Iterator[str]:
        """Why the event is not whole, one message each; changes nothing."""
        found = self._rules[type(event)][0](event)
        # loading a model begins before the library can open a session on its own
        begin = self._begin or 0
        if event.t < begin and not isinstance(event, schema.Model):
            return chain([f"`t` is {begin - event.t} ns before session_start"], found)
        return found

    def take(self, line: int, event: schema.Event) -> None:
        """Keep what later events can name. An event that is not whole is taken as far as later
        events can then be checked."""
        self._rules[type(event)][1](line, event)

    def is_of_earlier_part(self, event: schema.Event) -> bool:
        """Whether a device gives the kernels of a compute that an earlier part of the log has, and
        that part is not read."""
        if not isinstance(event, schema.Ops) or not event.device or self._part == 1:
            return False
        return self._first_compute is None or event.compute < self._first_compute

    @property
    def awaits_devices(self) -> bool:
        """Whether kernels of a device are still to come, as far as is known."""
        return any(
            device in self.devices and split not in of.given
            for of in self.behind.values()
            for split, device in of.graph.device_splits.items()
        )

    def step_of(self, event: schema.Event) -> int:
        """The step that the latest event belongs to, -1 for none, or for several."""
        if isinstance(event, schema.Rpc):
            return -1
        step: int | None = getattr(event, "step", None)
        if step is None:
            number = getattr(event, "compute", -1)
            compute = self.computes.get(number) or self.behind.get(number)
            step = compute.event.step if compute else -1
        return step

    # --- facts ---

    def _check_session_start(self, _event: schema.SessionStart) -> Iterator[str]:
        if self._begin is not None:
            yield "occurs a second time"

    def _take_session_start(self, _line: int, event: schema.SessionStart) -> None:
        if self._begin is None:
            self._begin, self._part, self.start = event.t, event.part, event

    def _check_model(self, event: schema.Model) -> Iterator[str]:
        if event.model in self.models:
            yield f"model {event.model} was given before"

    def _take_model(self, _line: int, event: schema.Model) -> None:
        self.models.setdefault(event.model, KnownModel(event))

    def _check_tensor(self, event: schema.Tensor) -> Iterator[str]:
        model = self.models.get(event.model)
        if math.prod(event.ne) > schema.MOST:
            yield "an impossible tensor shape"
        yield from self._known("model", event.model)
        if model is not None and event.tensor in model.tensors:
            yield f"tensor {event.tensor} of model {event.model} was given before"

    def _take_tensor(self, _line: int, event: schema.Tensor) -> None:
        if (model := self.models.get(event.model)) is not None:
            self.model = model
            if model.tensors.add(event.tensor) and event.tensor < schema.WEIGHTS_KEPT:
                model.weights[event.tensor] = leaf_of(event)

    def _check_context(self, event: schema.Context) -> Iterator[str]:
        if event.ctx in self._given["context"]:
            yield f"context {event.ctx} was given before"
        yield from self._known("model", event.model)

    def _take_context(self, _line: int, event: schema.Context) -> None:
        model = self.models.get(event.model)
        if model is None or not self._given["context"].add(event.ctx):
            return
        self.model = model
        self.context = self.contexts[event.ctx] = KnownContext(event, model)
        if (target := self.contexts.get(event.target)) is not None:
            target.batches.verifies = True
        if len(self.contexts) > schema.CONTEXTS_KEPT:
            forgotten = self.contexts.pop(next(iter(self.contexts)))
            for graph in forgotten.graphs.values():
                self._forget(graph)
            if forgotten.compute:
                del self.computes[forgotten.compute.event.compute]
            # they refer to each other: without this they would wait for the garbage collector
            forgotten.graphs.clear()
            forgotten.compute = None

    def _check_graph(self, event: schema.Graph) -> Iterator[str]:
        if event.graph in self._given["graph"]:
            yield f"graph {event.graph} was given before"
            return
        yield from self._known("context", event.ctx)
        known = self._weights(event.ctx)
        unknown = (of.tensor for of in event.leafs if is_weight(of) and of.tensor not in known)
        if (missing := next(unknown, None)) is not None:
            yield f"it reads tensor {missing}, which was never given"
            return
        if event.like is not None:
            yield self._unlike("graph", event.like, self.graphs)
        elif event.changes is not None:
            yield "its `changes` do not fit its nodes"
        else:
            yield from graph_problems(event)

    def _take_graph(self, _line: int, event: schema.Graph) -> None:
        context = self._named(event.ctx)
        if context is None or not self._given["graph"].add(event.graph):
            return
        self.graphs[event.graph] = context.graphs[event.graph] = KnownGraph(event, context)
        if len(context.graphs) > schema.GRAPHS_KEPT:
            self._forget(context.graphs.pop(next(iter(context.graphs))))

    def _check_plan(self, event: schema.Plan) -> Iterator[str]:
        graph = self.graphs.get(event.graph)
        if event.plan in self._given["plan"]:
            yield f"plan {event.plan} was given before"
        elif graph is None:
            yield self._missing("graph", event.graph)
        elif event.like is not None:
            yield self._unlike("plan", event.like, self.plans)
        else:
            yield from plan_problems(event, graph.event)

    def _take_plan(self, _line: int, event: schema.Plan) -> None:
        graph = self.graphs.get(event.graph)
        if graph is None or not self._given["plan"].add(event.plan):
            return
        self.graph = graph
        self.plan = self.plans[event.plan] = KnownPlan(event, graph)
        graph.plans.append(event.plan)

    def _forget(self, graph: KnownGraph) -> None:
        del self.graphs[graph.event.graph]
        for plan in graph.plans:
            del self.plans[plan]

    def _check_mark(self, event: schema.Mark) -> Iterator[str]:
        if event.phase == "end":
            if event.mark not in self.open_marks:
                yield f"mark {event.mark} ends and was not begun"
        elif event.mark in self._given["mark"]:
            yield f"mark {event.mark} was given before"

    def _take_mark(self, line: int, event: schema.Mark) -> None:
        if event.phase == "end":
            if (opened := self.open_marks.pop(event.mark, None)) is not None:
                self.mark = opened[1]
                seq = event.seq if event.seq >= 0 else self.mark.seq
                for context in self.contexts.values():
                    context.batches.request_ended(seq, self.mark.t)
        elif self._given["mark"].add(event.mark) and event.phase == "begin":
            self.open_marks[event.mark] = line, event

    # --- steps and computes ---

    def _check_step_begin(self, event: schema.StepBegin) -> Iterator[str]:
        yield from self._known("context", event.ctx)
        yield from sequence_problems(event)
        if event.step in self._given["step"]:
            yield f"step {event.step} was given before"

    def _take_step_begin(self, line: int, event: schema.StepBegin) -> None:
        context = self._named(event.ctx)
        if not self._given["step"].add(event.step):
            return
        parts = context.batches.parts(event) if context else []
        target = context.event.target if context else -1
        self.step = self.open_steps[event.step] = KnownStep(event, line, parts, target)

    def _check_step_end(self, event: schema.StepEnd) -> Iterator[str]:
        if event.step not in self.open_steps:
            over = event.step in self._given["step"]
            yield f"step {event.step} was {'ended before' if over else 'never begun'}"

    def _take_step_end(self, _line: int, event: schema.StepEnd) -> None:
        self.step = self.open_steps.pop(event.step, None)

    def _check_compute(self, event: schema.Compute) -> Iterator[str]:
        graph, step = self.graphs.get(event.graph), self.open_steps.get(event.step)
        if event.compute in self._given["compute"]:
            yield f"compute {event.compute} was given before"
            return
        yield from self._known("context", event.ctx)
        yield from self._known("graph", event.graph)
        if graph and graph.event.ctx != event.ctx:
            yield f"of context {event.ctx}, its graph is of context {graph.event.ctx}"
        if step is None and event.step != -1:
            over = event.step in self._given["step"]
            yield f"step {event.step} {'is over' if over else 'never began'}"
        elif step and step.event.ctx != event.ctx:
            yield f"of context {event.ctx}, its step is of context {step.event.ctx}"

    def _take_compute(self, _line: int, event: schema.Compute) -> None:
        context, graph = self._named(event.ctx), self.graphs.get(event.graph)
        self.step = self.open_steps.get(event.step)
        if context is None or graph is None or not self._given["compute"].add(event.compute):
            return
        if context.compute:
            del self.computes[context.compute.event.compute]
        self.graph = graph
        ubatch = None
        if self.masks and event.ctx >= 0:
            ubatch = context.caches.compute(event, self.step.event if self.step else None)
        made = KnownCompute(event, graph, ubatch, self.step)
        self.compute = context.compute = self.computes[event.compute] = made
        if self._first_compute is None:
            self._first_compute = event.compute
        if graph.device_splits:
            self.behind[event.compute] = made
            if len(self.behind) > RUNS_KEPT:
                del self.behind[next(iter(self.behind))]
        recent = graph.context.graphs
        recent[event.graph] = recent.pop(event.graph)

    # --- measurements ---

    def _check_experts(self, event: schema.Experts) -> Iterator[str]:
        yield from self._known("compute", event.compute)
        if (compute := self.computes.get(event.compute)) is not None:
            yield from experts_problems(event, compute.graph.choices)

    def _take_experts(self, line: int, event: schema.Experts) -> None:
        self._take_layers(line, event)
        if (compute := self.computes.get(event.compute)) is not None and compute.ubatch is not None:
            used = Used(tuple(event.node), tuple(map(len, event.expert)))
            if used != compute.graph.used:
                compute.graph.used = used
            compute.ubatch = compute.ubatch._replace(experts=compute.graph.used)

    def _check_layers(self, event: schema.Layers) -> Iterator[str]:
        yield from interval_problems(event, layer=event.layer, gap=event.gap)
        yield from self._known("compute", event.compute)

    def _check_ops(self, event: schema.Ops) -> Iterator[str]:
        yield from interval_problems(event, gap=event.gap, wait=event.wait)
        computes = self.behind if event.device else self.computes
        compute, plan = computes.get(event.compute), self.plans.get(event.plan)
        if compute is None:
            yield self._missing("compute", event.compute)
        if plan is None:
            yield self._missing("plan", event.plan)
        elif len(event.dur) != len(plan.event.node):
            yield f"{len(event.dur)} kernels, plan {event.plan} has {len(plan.event.node)}"
        elif compute and event.device:
            of = plan.event, plan.graph.event
            yield from device_ops_problems(event, compute.graph.event, *of)
        elif compute and plan.graph is not compute.graph:
            other = compute.event.graph
            yield f"plan {event.plan} is of graph {plan.event.graph}, the compute of graph {other}"

    def _take_ops(self, line: int, event: schema.Ops) -> None:
        if not event.device:
            self._take_layers(line, event)
        elif (compute := self.behind.get(event.compute)) is not None:
            self.compute = compute
            compute.given.add(event.split)
        if (plan := self.plans.get(event.plan)) is not None:
            self.plan = plan

    def _take_device(self, _line: int, event: schema.Device) -> None:
        self.devices[event.name] = event

    def _check_connection(self, event: schema.Connection) -> Iterator[str]:
        if event.connection in self._given["connection"]:
            yield f"connection {event.connection} was given before"

    def _take_connection(self, _line: int, event: schema.Connection) -> None:
        if self._given["connection"].add(event.connection):
            self.connections[event.connection] = event

    def _check_rpc(self, event: schema.Rpc) -> Iterator[str]:
        if (connection := self.connections.get(event.connection)) is not None:
            yield from call_problems(event, connection.side)
        elif event.connection in self._given["connection"]:
            yield f"connection {event.connection} has ended"
        else:
            yield f"connection {event.connection} was never given"

    def _check_connection_end(self, event: schema.ConnectionEnd) -> Iterator[str]:
        if event.connection not in self.connections:
            over = event.connection in self._given["connection"]
            yield f"connection {event.connection} {'has ended' if over else 'was never given'}"

    def _take_connection_end(self, _line: int, event: schema.ConnectionEnd) -> None:
        self.connections.pop(event.connection, None)

    def _check_splits(self, event: schema.Splits) -> Iterator[str]:
        columns = {"split": event.split, "gap": event.gap, "asynchronous": event.asynchronous}
        yield from interval_problems(event, **columns)
        yield from self._known("compute", event.compute)
        compute = self.computes.get(event.compute)
        if compute and max(event.split, default=-1) >= len(compute.graph.event.splits):
            yield f"split {max(event.split)}, the graph has {len(compute.graph.event.splits)}"

    def _check_tensor_stats(self, event: schema.TensorStats) -> Iterator[str]:
        graph = self.graphs.get(event.graph)
        yield from self._known("compute", event.compute)
        yield from self._known("graph", event.graph)
        if graph and event.node >= graph.event.n_nodes:
            yield f"node {event.node} of graph {event.graph}, which has {graph.event.n_nodes}"

    def _take_tensor_stats(self, line: int, event: schema.TensorStats) -> None:
        self._take_layers(line, event)
        if (graph := self.graphs.get(event.graph)) is not None:
            self.graph = graph

    def _take_layers(self, _line: int, event: Measured) -> None:
        if (compute := self.computes.get(event.compute)) is not None:
            self.compute = compute

    _take_splits = _take_layers

    def _check_memory(self, event: schema.Memory | schema.Adapters | schema.Sync) -> Iterator[str]:
        yield from self._known("context", event.ctx)

    def _take_memory(
        self, _line: int, event: schema.Memory | schema.Adapters | schema.Sync
    ) -> None:
        self._named(event.ctx)

    _check_adapters, _take_adapters = _check_memory, _take_memory
    _check_sync, _take_sync = _check_memory, _take_memory

    def _check_kv(self, event: schema.Kv | schema.Token) -> Iterator[str]:
        yield from self._known("context", event.ctx)
        if event.step != -1 and event.step not in self._given["step"]:
            yield f"step {event.step} never began"

    _check_token = _check_kv

    def _take_kv(self, _line: int, event: schema.Kv) -> None:
        if (context := self._named(event.ctx)) is not None:
            if self.masks:
                context.caches.take(event)
            context.batches.moved(event)

    def _take_token(self, _line: int, event: schema.Token) -> None:
        if (context := self._named(event.ctx)) is not None:
            context.batches.sampled(event)

    def _named(self, ctx: int) -> KnownContext | None:
        """The context, which is now the one that was named last."""
        if ctx == -1:
            self.context = self._of_clients
            return self.context
        context = self.contexts.pop(ctx, None)
        if context is not None:
            self.context = self.contexts[ctx] = context
        return context

    def _weights(self, ctx: int) -> dict[int, schema.Leaf]:
        context = self.contexts.get(ctx)
        return context.model.weights if context else {}

    def _unlike(self, what: str, number: int, known: Container[int]) -> str:
        """Why an event that is like another one cannot be made whole."""
        if number in known:
            return f"does not fit {what} {number}, which it is like"
        return self._missing(what, number)

    def _missing(self, what: str, number: int) -> str:
        given = number in self._given[what]
        return f"{what} {number} {_FORGOTTEN[what] if given else 'was never given'}"

    def _known(self, what: str, number: int) -> Sequence[str]:
        """Why a model, context, graph, plan or compute cannot be named, if so."""
        if number in self._nameable[what] or (number == -1 and what == "context"):
            return ()
        return (self._missing(what, number),)


_GRAPHS = schema.GRAPHS_KEPT
_FORGOTTEN = {
    "context": f"was given, but {schema.CONTEXTS_KEPT} others were named since",
    "graph": f"was given, but {_GRAPHS} others of its context were given or computed since",
    "plan": f"was given, but {_GRAPHS} other graphs were given or computed since",
    "compute": "is over",
}
