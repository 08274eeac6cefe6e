"""Answers the requests of one client, and tells it what happens: the protocol without its bytes.

`handle` is called with one message after the other, by one thread. The model runs in a thread of
its own; at a stop it waits for the request that lets it go on. `send` gets every message for the
client, from both threads, one at a time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.terminal import printable, printable_text, shortened
from llamacpp_instr.debugger.commands import Commands
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.dap import requests
from llamacpp_instr.debugger.dap.breakpoints import (
    FILTERS,
    Breakpoints,
    Placed,
    SetBreakpoints,
    SetExceptionBreakpoints,
    SetFunctionBreakpoints,
    Wanted,
)
from llamacpp_instr.debugger.dap.framing import ProtocolError
from llamacpp_instr.debugger.dap.sources import (
    MIME_TYPE,
    Frame,
    SourceArgument,
    Sources,
    frames_of,
)
from llamacpp_instr.debugger.dap.variables import (
    SetVariableArguments,
    TensorArguments,
    Variables,
    VariablesArguments,
    picture,
)
from llamacpp_instr.debugger.graph import LiveGraph
from llamacpp_instr.debugger.stop import STEPS, Go, Stop

Json = dict[str, Any]
THREAD = 1


class Adapter:
    """A debug adapter for one client and one run of a model, which `launch` makes."""

    def __init__(
        self,
        send: Callable[[Json], None],
        launch: requests.Launch,
        words: Callable[[str], str] = str,
    ) -> None:
        """`words` names in a message about the run what its client can change."""
        self._send_message, self._make, self._words = send, launch, words
        self._lock = threading.RLock()
        self._seq = 0
        self._then: list[Callable[[], None]] = []
        self._client = requests.InitializeArguments()
        self.debugger = Debugger(self.reached)
        self.debugger.on_graph = self._graph_is_known
        self.debugger.on_step = self._compute_begins
        self._sources = Sources()
        self._breakpoints = Breakpoints(self.debugger, self._sources, self._breakpoint_changed)
        self.commands = Commands(self.debugger)
        self.commands.also = "Other lines are names of tensors."
        self.more: dict[str, Callable[[Stop, Any], Json]] = {}
        """requests beside ours that are answered at a stop, from their arguments"""
        self._variables = Variables(self.commands.apply, self.commands.text)
        self._program: requests.Program | None = None
        self._configured = False
        self._thread: threading.Thread | None = None
        self._go: queue.SimpleQueue[Go] = queue.SimpleQueue()
        self._stop: Stop | None = None
        self._frames: list[Frame] = []
        self._asked: Literal["", "entry", "pause"] = ""
        self._quitting = self._ended = False
        self.is_over = False
        """whether the client has disconnected"""

    def handle(self, message: Json) -> None:
        """Answer a message. Raises `ProtocolError` if it is none; other errors are answers."""
        try:
            request = msgspec.convert(message, requests.Request)
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
                body = {"error": details | {"showUser": request.command in requests.BY_USER}}
            if body is not None:
                answer["body"] = body
            self._send(answer)
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
            text = self._sources.of(stop.graph)
            self._stop, self._frames = stop, frames_of(stop, text)
            self._variables.stopped(stop)
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
                self._event("loadedSource", reason="new", source=text.to_json())
            self._breakpoints.graph_is_known(graph)

    def _run(self, program: requests.Program) -> None:
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

    def _send(self, message: Json) -> None:
        with self._lock:
            self._seq += 1
            self._send_message({"seq": self._seq, **message})

    def _event(self, name: str, **body: Any) -> None:
        self._send({"type": "event", "event": name, "body": body})

    def _line(self, error: BaseException) -> str:
        return printable(shortened(self._words(str(error))))

    def _output(self, category: str, text: str) -> None:
        self._event("output", category=category, output=printable_text(text))

    def _breakpoint_changed(self, placed: Placed) -> None:
        self._event("breakpoint", reason="changed", breakpoint=placed.to_json(self._first_line))

    @property
    def _first_line(self) -> int:
        return int(self._client.lines_start_at_1)

    # --- requests ---

    def _answer(self, request: requests.Request) -> Json | None:
        answers = {
            "initialize": self._initialize, "launch": self._launch, "terminate": self._terminate,
            "configurationDone": self._configuration_done, "disconnect": lambda _: None,
            "setBreakpoints": self._set_breakpoints, "threads": self._threads,
            "setFunctionBreakpoints": self._set_functions, "pause": self._pause,
            "setExceptionBreakpoints": self._set_exceptions, "evaluate": self._evaluate,
            "stackTrace": self._stack_trace, "scopes": self._scopes, "variables": self._children,
            "setVariable": self._set_variable, "source": self._source,
            "loadedSources": self._loaded_sources, "continue": self._continue,
            "instr/tensor": self._picture,
        }  # fmt: skip
        if request.command in requests.LONGER:
            return self._step(request)
        if request.command in self.more:
            return self.more[request.command](self._stopped(), request.arguments)
        answer = answers.get(request.command)
        if answer is None:
            raise UsageError(f"no request is called {request.command[:60]!r}")
        return answer(request.arguments)

    def _initialize(self, arguments: Any) -> Json:
        self._client = requests.parse("initialize", arguments, requests.InitializeArguments)
        self._variables.paged = self._client.supports_variable_paging
        self._then.append(lambda: self._event("initialized"))
        return {
            "supportsConfigurationDoneRequest": True,
            "supportsFunctionBreakpoints": True,
            "supportsConditionalBreakpoints": True,
            "supportsHitConditionalBreakpoints": True,
            "supportsEvaluateForHovers": True,
            "supportsSetVariable": True,
            "supportsSteppingGranularity": True,
            "supportsLoadedSourcesRequest": True,
            "supportsTerminateRequest": True,
            "exceptionBreakpointFilters": [
                {"filter": name, "label": label, "description": words, "default": False}
                for name, (label, _, words) in FILTERS.items()
            ],
        }

    def _launch(self, arguments: Any) -> None:
        if self._program is not None:
            raise UsageError("launch: a model runs already")
        self._program = self._make(
            requests.parse("launch", arguments, dict[str, Any]),
            self.debugger,
            lambda text: self._output("stdout", text),
            lambda line: self._output("console", f"{self._words(line)}\n"),
        )
        self._begin()

    def _configuration_done(self, _arguments: Any) -> None:
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

    def _terminate(self, _arguments: Any) -> None:
        self._then.append(self._quit)

    def _quit(self) -> None:
        with self._lock:
            self._quitting = True
            if self._stop is not None:
                self._go_on(Go.QUIT)()
            elif self._program is not None:
                self._program.interrupt()

    def _threads(self, _arguments: Any) -> Json:
        return {"threads": [{"id": THREAD, "name": "decode"}]}

    def _set_breakpoints(self, arguments: Any) -> Json:
        wanted = requests.parse("setBreakpoints", arguments, SetBreakpoints)
        lines = wanted.breakpoints or [Wanted(line=line) for line in wanted.lines]
        moved = [replace(one, line=one.line + 1 - self._first_line) for one in lines]
        return self._placed(self._breakpoints.set_lines(wanted.source, moved))

    def _set_functions(self, arguments: Any) -> Json:
        wanted = requests.parse("setFunctionBreakpoints", arguments, SetFunctionBreakpoints)
        return self._placed(self._breakpoints.set_functions(wanted.breakpoints))

    def _set_exceptions(self, arguments: Any) -> Json:
        wanted = requests.parse("setExceptionBreakpoints", arguments, SetExceptionBreakpoints)
        return self._placed(self._breakpoints.set_exceptions(wanted.filters))

    def _placed(self, placed: list[Placed]) -> Json:
        return {"breakpoints": [one.to_json(self._first_line) for one in placed]}

    def _loaded_sources(self, _arguments: Any) -> Json:
        return {"sources": [text.to_json() for text in self._sources]}

    def _source(self, arguments: Any) -> Json:
        wanted = requests.parse("source", arguments, requests.SourceArguments)
        meant = wanted.source or SourceArgument(source_reference=wanted.source_reference)
        text = self._sources.find(meant)
        if text is None:
            raise UsageError("the listing of this graph does not exist; a compute makes it")
        return {"content": text.listing.text, "mimeType": MIME_TYPE}

    # --- requests at a stop ---

    def _stopped(self) -> Stop:
        if self._stop is None:
            over = "the run has ended; launch it again"
            raise UsageError(over if self._ended else "the model is not stopped; pause it first")
        return self._stop

    def _stack_trace(self, arguments: Any) -> Json:
        wanted = requests.parse("stackTrace", arguments, requests.StackTraceArguments)
        text = self._sources.of(self._stopped().graph)
        begin = max(wanted.start_frame, 0)
        end = begin + wanted.levels if wanted.levels > 0 else None
        frames = [frame.to_json(text, self._first_line) for frame in self._frames[begin:end]]
        return {"stackFrames": frames, "totalFrames": len(self._frames)}

    def _scopes(self, arguments: Any) -> Json:
        number = requests.parse("scopes", arguments, requests.ScopesArguments).frame_id
        stop = self._stopped()
        frame = next((frame for frame in self._frames if frame.id == number), None)
        if frame is None:
            raise UsageError(f"there is no frame {number}")
        return {"scopes": self._variables.scopes(stop, frame)}

    def _children(self, arguments: Any) -> Json:
        wanted = requests.parse("variables", arguments, VariablesArguments)
        self._stopped()
        return {"variables": list(map(self._known, self._variables.children(wanted)))}

    def _set_variable(self, arguments: Any) -> Json:
        wanted = requests.parse("setVariable", arguments, SetVariableArguments)
        self._stopped()
        changed = self._variables.set(wanted)
        self._values_changed()
        return self._known(changed, "name", "evaluateName")

    def _known(self, variable: Json, *without: str) -> Json:
        """What the client takes of a variable."""
        if not self._client.supports_variable_type:
            without += ("type",)
        return {key: value for key, value in variable.items() if key not in without}

    def _values_changed(self) -> None:
        self._variables.forget_values()
        if self._client.supports_invalidated_event:
            self._then.append(lambda: self._event("invalidated", areas=["variables"]))

    def _evaluate(self, arguments: Any) -> Json:
        wanted = requests.parse("evaluate", arguments, requests.EvaluateArguments)
        if wanted.context == "repl":
            changes = self.commands.changes
            output = self.commands.run(wanted.expression, self._stopped)
            if changes != self.commands.changes:
                self._values_changed()
            if isinstance(output, Go):
                self._then += [
                    lambda: self._event("continued", threadId=THREAD),
                    self._go_on(output),
                ]
                return {"result": output.value, "variablesReference": 0}
            if output is not None:
                return {"result": printable_text(output), "variablesReference": 0}
        self._stopped()
        found = self._variables.named(wanted.expression.strip())
        result = {"result": found["value"]}
        return result | self._known(found, "name", "value", "evaluateName")

    def _picture(self, arguments: Any) -> Json:
        wanted = requests.parse("instr/tensor", arguments, TensorArguments)
        self._stopped()
        tensor, values = self._variables.values(wanted.name)
        return {"name": tensor.name, "type": tensor.type, **picture(wanted, values)}

    def _continue(self, _arguments: Any) -> Json:
        self._then.append(self._go_on(Go.ON))
        return {"allThreadsContinued": True}

    def _step(self, request: requests.Request) -> Json | None:
        wanted = requests.parse(request.command, request.arguments, requests.StepArguments)
        name = wanted.granularity
        steps = STEPS | requests.LONGER[request.command]
        if name not in steps:
            raise UsageError(f"granularity {name[:60]!r} is none of {', '.join(steps)}")
        self._then.append(self._go_on(steps[name]))
        return None

    def _go_on(self, go: Go) -> Callable[[], None]:
        """What lets the model go on; it is called when the answer is sent."""
        self._stopped()
        self._stop, self._frames = None, []
        self._variables.stopped(None)
        return lambda: self._go.put(go)

    def _pause(self, _arguments: Any) -> None:
        if self._stop is None:
            self._asked = "pause"
