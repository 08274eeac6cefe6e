"""Answers the requests of one client, and tells it what happens: the protocol without its bytes."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.terminal import printable, printable_text, shortened
from llamacpp_instr.debugger.commands import Commands
from llamacpp_instr.debugger.dap.sources import (
    FILTERS,
    Breakpoints,
    Sources,
    source_json,
)
from llamacpp_instr.debugger.dap.variables import OP, Variables
from llamacpp_instr.debugger.graph import LiveGraph
from llamacpp_instr.debugger.stop import STEPS, Debugger, Go, Stop

Json = dict[str, Any]
T = TypeVar("T")
THREAD = 1
LONGER = {
    "stepIn": {"instruction": Go.OP, "line": Go.OP, "statement": Go.OP},
    "next": {"instruction": Go.OP, "line": Go.BLOCK, "statement": Go.BLOCK},
    "stepOut": {"instruction": Go.BLOCK, "line": Go.LAYER, "statement": Go.LAYER},
}
"""where a step ends, by request and by the protocol's granularity"""
BY_USER = ("launch", "continue", "pause", *LONGER)
"""requests of a user: an error may pop up; editors send others on their own, as for each hover"""
_SUPPORTED = (
    "ConfigurationDoneRequest", "FunctionBreakpoints", "ConditionalBreakpoints",
    "HitConditionalBreakpoints", "EvaluateForHovers", "SetVariable", "SteppingGranularity",
    "LoadedSourcesRequest", "TerminateRequest",
)  # fmt: skip


class ProtocolError(UsageError):
    """What was received is not a message; the connection cannot go on."""


def parse(request: str, arguments: Any, of_type: type[T]) -> T:
    """`arguments` as `of_type`. Raises `UsageError` for a missing key or a wrong type."""
    try:
        return msgspec.convert(arguments if arguments is not None else {}, of_type)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        what, _, where = str(error).partition(" - at `$.")
        place = f"{where.rstrip('`')}: " if where else ""
        raise UsageError(f"{request}: {place}{re.sub(r'`', '', what)}") from None


class Request(msgspec.Struct):
    seq: int
    type: Literal["request", "response"]
    command: str = ""
    arguments: Any = None


def _arguments(request: Request, answer: Callable[..., Any]) -> Json:
    """The request's arguments, as those of the method that answers it. Raises as `parse` does."""
    fields: list[tuple[str, Any, Any]] = []
    for name, of in signature(answer, eval_str=True).parameters.items():
        if of.kind is Parameter.VAR_KEYWORD:
            return parse(request.command, request.arguments, Json)
        default = msgspec.NODEFAULT if of.default is Parameter.empty else of.default
        fields.append((name, of.annotation, msgspec.field(default=default)))
    if not fields:
        return {}
    of_type = msgspec.defstruct("Arguments", fields, rename="camel")
    return msgspec.structs.asdict(parse(request.command, request.arguments, of_type))


class Program(NamedTuple):
    """A run that `launch` has checked."""

    stop_on_entry: bool
    """whether its first op is a stop"""
    run: Callable[[], object]
    """runs it to its end, with the debugger. Raises `InstrError` if that failed, and
    `KeyboardInterrupt` after `interrupt`"""
    interrupt: Callable[[], None]
    """ends it soon; called by another thread"""


Launch = Callable[[Json, "Adapter"], Program]
"""makes the run of a launch configuration, stopped by the adapter's debugger"""


class Adapter:
    """A debug adapter for one client and one run of a model, which `launch` makes.

    `handle` is called with one message after the other, by one thread. The model runs in a thread
    of its own; at a stop it waits for the request that lets it go on. `send` gets every message for
    the client, from both threads, one at a time.
    """

    def __init__(
        self, send: Callable[[Json], None], launch: Launch, words: Callable[[str], str] = str
    ) -> None:
        """`words` makes a message about the run name what its client can change."""
        self._send_message, self._make, self._words = send, launch, words
        self._lock = threading.RLock()
        self._seq = 0
        self._then: list[Callable[[], None]] = []
        self._takes_invalidated = False
        """whether the client understands that event"""
        self.debugger = Debugger(self.reached)
        self.debugger.on_graph = self._graph_is_known
        self.debugger.on_step = self._compute_begins
        self._sources = Sources()
        self._breakpoints = Breakpoints(self.debugger, self._sources, self._changed)
        self.commands = Commands(self.debugger, also="Other lines are names of tensors.")
        self._variables = Variables(self.commands, self._stopped)
        self._program: Program | None = None
        self._configured = False
        self._thread: threading.Thread | None = None
        self._go: queue.SimpleQueue[Go] = queue.SimpleQueue()
        self._stop: Stop | None = None
        self._asked: Literal["", "entry", "pause"] = ""
        self._quitting = self._ended = False
        self.is_over = False
        """whether the client has disconnected"""

    def handle(self, message: Json, reply: Callable[[Json], None] | None = None) -> None:
        """Answer a message, also with an error, through `reply`, by default `send`. Raises
        `ProtocolError` if it is not a message."""
        try:
            request = msgspec.convert(message, Request)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"a message is not a request: {error}") from None
        if request.type == "response":
            return
        if request.command == "disconnect":
            self.close()
        with self._lock:
            answer: Json = {"type": "response", "request_seq": request.seq, "success": True}
            answer["command"] = request.command
            try:
                body = self._answer(request)
            except InstrError as error:
                text = self._line(error)
                answer |= {"success": False, "message": text}
                details = {"id": 1, "format": "{text}", "variables": {"text": text}}
                body = {"error": details | {"showUser": request.command in BY_USER}}
            if body is not None:
                answer["body"] = body
            self._send(answer, reply or self._send_message)
            then, self._then = self._then, []
        for action in then:
            action()

    def close(self) -> None:
        """End the run, if there is one, and wait until its log is whole."""
        self._quit()
        if self._thread is not None:
            self._thread.join()
        self.is_over = True

    # --- called by the model's thread ---

    def reached(self, stop: Stop) -> Go:
        """Tell the client about a stop, and wait until it goes on."""
        with self._lock:
            if self._quitting:
                return Go.QUIT
            self._stop = stop
            self._variables.begin(stop)
            reason, why, ids = self._breakpoints.reason(stop)
            if not stop.hit and self._asked:
                reason = self._asked
            self._asked = ""
            self._event(
                "stopped", reason=reason, description=why, text=why,
                threadId=THREAD, allThreadsStopped=True, hitBreakpointIds=ids,
            )  # fmt: skip
        return self._go.get()

    def _compute_begins(self, _step: int) -> None:
        with self._lock:
            if self._asked or self._quitting:
                self.debugger.go = Go.OP

    def _graph_is_known(self, graph: LiveGraph) -> None:
        with self._lock:
            known = len(self._sources)
            text = self._sources.of(graph)
            if len(self._sources) > known:
                self._event("loadedSource", reason="new", source=source_json(text))
            self._breakpoints.graph_is_known(graph)

    def _run(self, program: Program) -> None:
        status = 0
        try:
            program.run()
        except (InstrError, KeyboardInterrupt) as error:
            if not self._quitting:
                status = error.exit_code if isinstance(error, InstrError) else 130
                self._output("stderr", f"Error: {self._line(error)}\n")
        finally:
            self._ended = True
            self._event("exited", exitCode=status)
            self._event("terminated")

    # --- what is sent ---

    def _send(self, message: Json, send: Callable[[Json], None]) -> None:
        with self._lock:
            self._seq += 1
            send({"seq": self._seq, **message})

    def _event(self, name: str, **body: Any) -> None:
        self._send({"type": "event", "event": name, "body": body}, self._send_message)

    def _line(self, error: BaseException) -> str:
        return printable(shortened(self._words(str(error))))

    def _output(self, category: str, text: str) -> None:
        self._event("output", category=category, output=printable_text(text))

    def emit(self, text: str) -> None:
        """Send text that the model has generated."""
        self._output("stdout", text)

    def say(self, line: str) -> None:
        """Send a line about the run."""
        self._output("console", f"{self._words(line)}\n")

    def _changed(self, breakpoint: Json) -> None:
        self._event("breakpoint", reason="changed", breakpoint=breakpoint)

    # --- requests ---

    # Each is answered by the method of its name, of this class, the listings, the breakpoints or
    # the variables; the method's parameters are the request's arguments.

    def _answer(self, request: Request) -> Json | None:
        name = request.command
        answers = (self, self._sources, self._breakpoints, self._variables)
        found = (getattr(of, f"do_{name.replace('/', '_')}", None) for of in answers)
        answer: Any = next(filter(None, found), None)
        if name in LONGER:
            answer = partial(self._step, STEPS | LONGER[name])
        if answer is None:
            raise UsageError(f"no request is called {name[:60]!r}")
        changes = self.debugger.changes
        body: Json | None = answer(**_arguments(request, answer))
        if changes != self.debugger.changes:
            self._variables.forget_values()
            if self._takes_invalidated:
                self._then.append(lambda: self._event("invalidated", areas=["variables"]))
        return body

    def do_initialize(
        self,
        lines_start_at_1: bool = True,
        supports_variable_paging: bool = False,
        supports_variable_type: bool = False,
        supports_invalidated_event: bool = False,
    ) -> Json:
        self._takes_invalidated = supports_invalidated_event
        self._variables.typed = supports_variable_type
        self._variables.paged = supports_variable_paging
        self._breakpoints.first_line = int(lines_start_at_1)
        self._then.append(lambda: self._event("initialized"))
        return {
            **{f"supports{name}": True for name in _SUPPORTED},
            "exceptionBreakpointFilters": [
                {"filter": name, "label": label, "description": words, "default": False}
                for name, (label, _, words) in FILTERS.items()
            ],
        }

    def do_launch(self, /, **arguments: Any) -> None:
        if self._program is not None:
            raise UsageError("launch: a model is already running")
        self._program = self._make(arguments, self)
        self._begin()

    def do_configurationDone(self) -> None:
        self._configured = True
        self._begin()

    def _begin(self) -> None:
        """Run the model, once it is launched and the client has set its breakpoints."""
        if self._program is None or not self._configured or self._thread is not None:
            return
        self._asked = "entry" if self._program.stop_on_entry else ""
        self._thread = threading.Thread(target=self._run, args=(self._program,), name="debugged")
        self._then.append(lambda: self._event("thread", reason="started", threadId=THREAD))
        self._then.append(self._thread.start)

    def do_disconnect(self) -> None:
        """`handle` has ended the run."""

    def do_terminate(self) -> None:
        self._then.append(self._quit)

    def _quit(self) -> None:
        with self._lock:
            self._quitting = True
            if self._stop is not None:
                self._go_on(Go.QUIT)()
            elif self._program is not None:
                self._program.interrupt()

    def do_threads(self) -> Json:
        return {"threads": [{"id": THREAD, "name": "decode"}]}

    # --- requests at a stop ---

    def _stopped(self) -> Stop:
        if self._stop is None:
            over = "the run has ended; launch it again"
            raise UsageError(over if self._ended else "the model is not stopped; pause it first")
        return self._stop

    def do_stackTrace(self, start_frame: int = 0, levels: int = 0) -> Json:
        source = source_json(self._sources.of(self._stopped().graph))
        begin = max(start_frame, 0)
        end = begin + levels if levels > 0 else None
        frames = [
            {
                "id": number, "name": frame.name, "source": source,
                "line": frame.line - 1 + self._breakpoints.first_line, "column": 1,
            }
            for number, frame in list(enumerate(self._variables.frames, OP))[begin:end]
        ]  # fmt: skip
        return {"stackFrames": frames, "totalFrames": len(self._variables.frames)}

    def do_evaluate(self, expression: str, context: str | None = None) -> Json:
        if context == "repl":
            output = self.commands.run(expression, self._stopped)
            if isinstance(output, Go):
                self._then += [
                    lambda: self._event("continued", threadId=THREAD),
                    self._go_on(output),
                ]
                return {"result": output.value, "variablesReference": 0}
            if output is not None:
                return {"result": printable_text(output), "variablesReference": 0}
        found = self._variables.named(expression.strip())
        result = {"result": found["value"]}
        return result | self._variables.known(found, "name", "value", "evaluateName")

    def do_continue(self) -> Json:
        self._then.append(self._go_on(Go.ON))
        return {"allThreadsContinued": True}

    def _step(self, steps: dict[str, Go], granularity: str = "statement") -> None:
        if granularity not in steps:
            raise UsageError(f"granularity {granularity[:60]!r} is not one of {', '.join(steps)}")
        self._then.append(self._go_on(steps[granularity]))

    def _go_on(self, go: Go) -> Callable[[], None]:
        """What lets the model go on; it is called when the answer is sent."""
        self._stopped()
        self._stop = None
        self._variables.begin(None)
        return lambda: self._go.put(go)

    def do_pause(self) -> None:
        if self._stop is None:
            self._asked = "pause"
