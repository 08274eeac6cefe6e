"""What `instr debug` runs: a model or a program, stopped in the terminal, by an editor or in the
browser; and, after changes, the model again without them, to compare both continuations."""

from __future__ import annotations

import difflib
import io
import os
import re
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import starmap, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.system import need, temporary_directory
from llamacpp_instr.base.terminal import notice, print_line, printable_text
from llamacpp_instr.debugger.capture import CollectedLogits
from llamacpp_instr.debugger.commands import Terminal
from llamacpp_instr.debugger.dap.adapter import Adapter, Json, Program, parse
from llamacpp_instr.debugger.dap.transports import ends_by_signals, serve_stdio, serve_tcp
from llamacpp_instr.debugger.residual import log_soft_max
from llamacpp_instr.debugger.stop import Breakpoint, Debugger, Go, begin_debugged
from llamacpp_instr.debugger.tensors import Array
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.llama.generate import Sampling
from llamacpp_instr.llama.log import Interrupt
from llamacpp_instr.log.reader import read_events
from llamacpp_instr.log.schema import Token
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.recording.session import check_log_path
from llamacpp_instr.run.session import RunOptions, default_log, run

if TYPE_CHECKING:
    from llamacpp_instr.debugger.page.server import DebugServer, SharedRun

DEBUG_LOG = Path("debug.log")
PATIENCE_S = 3.0
"""after this time, a program that goes on although its compute was ended is interrupted"""

Compared = tuple[list["Step"], dict[int, str]]
"""both continuations token by token, and the texts of their tokens"""


class Launch(msgspec.Struct, rename="camel"):
    """The keys of a launch configuration: the options of `instr run` by their names."""

    model: str | None = None
    """the default is the model of the command line"""
    prompt: str | None = None
    n: int = 16
    log: str | None = None
    level: str = "detailed"
    force: bool = False
    ctx: int | None = None
    batch: int | None = None
    ubatch: int | None = None
    threads: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "auto"
    temp: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    chat: bool = False
    mmap: bool = True
    stop_on_entry: bool = False
    """stop after the first op"""
    no_debug: bool = False
    """run without stops; editors set it"""


KEYS = [field.encode_name for field in msgspec.structs.fields(Launch)]
_OPTION = re.compile(r"(?<![\w-])--?([a-z]+)((?:-[a-z]+)*)")
_EDITORS_OWN = ("type", "name", "request", "program", "cwd", "env", "args", "console")


def checked_run(
    options: RunOptions,
    adapter: Adapter,
    compared: Callable[[Compared], None],
    stop_on_entry: bool = False,
    no_debug: bool = False,
) -> Program:
    """A run that a debug adapter launches. After changes it runs again without them, and `compared`
    gets the comparison. Raises `UsageError` for what the command line refuses."""
    options.check()
    assert options.log is not None
    load_model_file(options.model).check_has_weights()
    check_log_path(options.log, options.force, '"force": true')
    interrupt = Interrupt()

    def run_model() -> None:
        out = cast(BinaryIO, _TextStream(adapter.emit))
        debugger = None if no_debug else adapter.debugger
        found = run_and_compare(options, out, adapter.say, debugger, interrupt=interrupt)
        if found is not None:
            compared(found)

    return Program(stop_on_entry and not no_debug, run_model, interrupt.request)


def launch(model: str | None, prompt: str | None, arguments: Json, adapter: Adapter) -> Program:
    """The run that `configured` describes; the client gets a comparison as a table."""
    wanted, options = configured(model, prompt, arguments)

    def compared(found: Compared) -> None:
        adapter.say(as_table(*found))

    return checked_run(options, adapter, compared, wanted.stop_on_entry, wanted.no_debug)


def configured(model: str | None, prompt: str | None, arguments: Json) -> tuple[Launch, RunOptions]:
    """A launch configuration. `model` and `prompt` are the command line's, for keys that it lacks.

    Editors add keys of their own, which are ignored, but a key that looks like one of ours is
    refused. Raises `UsageError` for that, and for what the command line refuses.
    """
    for key in arguments:
        if key in KEYS or key in _EDITORS_OWN or key.startswith("__"):
            continue
        if near := difflib.get_close_matches(key, KEYS, 1, 0.75):
            raise UsageError(f"launch: {key[:60]!r} is not a key; did you mean {near[0]!r}?")
    wanted = parse("launch", arguments, Launch)
    if wanted.log == "-":
        raise UsageError("launch: the log must be a file; standard output carries the protocol")
    prompt = prompt if wanted.prompt is None else wanted.prompt
    if prompt is None:
        raise UsageError('launch: no prompt is given; add the key "prompt"')
    options = RunOptions(
        model=wanted.model or model or "",
        prompts=[prompt],
        log=Path(wanted.log) if wanted.log else default_log(wanted.force, DEBUG_LOG),
        sampling=msgspec.convert(wanted, Sampling, from_attributes=True).with_seed(),
        context=msgspec.convert(wanted, ContextOptions, from_attributes=True),
        **{name: getattr(wanted, name) for name in ("n", "level", "mmap", "chat", "force")},
    )
    return wanted, options


def in_keys(text: str) -> str:
    """The text with the key of a launch configuration in place of each option that it names."""

    def key(option: re.Match[str]) -> str:
        name = option[1] + option[2].title().replace("-", "")
        return f'"{name}"' if name in KEYS else option[0]

    return _OPTION.sub(key, text)


class _TextStream(io.RawIOBase):
    """Calls a function with the text that is written; each piece has whole characters."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._emit(bytes(data).decode(errors="replace"))
        return len(data)


def run_and_compare(
    options: RunOptions,
    out: BinaryIO,
    notice: Callable[[str], None],
    debugger: Debugger | None,
    ended: Callable[[], None] = lambda: None,
    interrupt: Interrupt | None = None,
) -> Compared | None:
    """Run a model, then call `ended`. If it reached its end and values were changed, run it again
    without the changes, and return both continuations. Raises what `run` raises."""
    logits, unchanged = CollectedLogits(), CollectedLogits()
    if debugger is not None:
        debugger.witnesses.append(logits)
    log = run(options, out, notice, debugger, interrupt)
    notice(f"log: {log}")
    ended()
    if debugger is None or not debugger.changes or debugger.go is Go.QUIT:
        return None
    notice("running again without the changes, for comparison")
    texts: dict[int, str] = {}

    def continuation(log: Path, logits: CollectedLogits) -> Continuation:
        tokens = [event for _, event in read_events(log) if isinstance(event, Token)]
        texts.update({token.id: token.text for token in tokens})
        rows = np.array(logits.rows[: len(tokens)])
        return Continuation([token.id for token in tokens], rows)

    follower = Debugger(lambda _stop: Go.ON)
    follower.witnesses.append(unchanged)
    with temporary_directory("instr-unchanged-") as directory:
        other = directory / "unchanged.log"
        run(replace(options, log=other), io.BytesIO(), lambda _line: None, follower, interrupt)
        before = continuation(other, unchanged)
    return compare(before, continuation(log, logits)), texts


def serve_editor(model: str | None, prompt: str | None, port: int | None) -> None:
    """Serve an editor, over standard input and output or over a port."""

    def adapter(send: Callable[[Json], None]) -> Adapter:
        return Adapter(send, partial(launch, model, prompt), in_keys)

    if port is None:
        serve_stdio(adapter)
    else:
        serve_tcp(adapter, port, lambda port: print_line(f"listening on 127.0.0.1:{port}"))


def debug_model(options: RunOptions, terminal: Terminal) -> None:
    """Run a model, stopped in the terminal."""
    compared = run_and_compare(
        options, sys.stdout.buffer, notice, terminal.debugger, ended=terminal.end
    )
    if compared is not None:
        print(printable_text(as_table(*compared)), file=sys.stderr, flush=True)


def debug_program(program: Sequence[str], terminal: Terminal, log: Path, force: bool) -> None:
    """Run a Python program in this process, stopped in the terminal."""
    command = check_program(program)
    with begin_debugged(log, force, "--force"), terminal.debugger, _may_quit(terminal.debugger):
        run_program(command)
    notice(f"log: {log}")
    terminal.end()


@contextmanager
def _may_quit(debugger: Debugger) -> Iterator[None]:
    """The block may end with the error that llama_cpp raises when a compute was ended."""
    try:
        yield
    except RuntimeError:
        if debugger.go is not Go.QUIT:
            raise


def debug_model_on_page(
    options: RunOptions, breakpoints: Sequence[str], port: int, show: Callable[[str], None]
) -> int:
    """Run a model, and serve its page until the user quits there, or Ctrl-C; `show` gets its
    address. Returns the exit status. Raises `UsageError` for what cannot be run, or served."""

    def make(_: Json, adapter: Adapter) -> Program:
        def tell(found: Compared) -> None:
            shared.tell("instr/comparison", as_json(*found))

        return checked_run(options, adapter, tell, stop_on_entry=not breakpoints)

    shared, server = _serving(make, breakpoints, port, options.model)
    with ends_by_signals():
        try:
            shared.start(breakpoints)
            server.run(lambda: show(server.address))
        finally:
            shared.adapter.close()
    for line in shared.state["lines"]:
        notice(line)
    return int(shared.state["exitCode"])


def debug_program_on_page(
    command: Sequence[str],
    log: Path,
    force: bool,
    breakpoints: Sequence[str],
    port: int,
    show: Callable[[str], None],
) -> None:
    """Run a Python program in this thread, and serve its page in another, until the program has
    ended and the user quits, or Ctrl-C; `show` and errors are as for `debug_model_on_page`."""
    command = check_program(command)
    check_log_path(log, force, "--force")
    has_ended = threading.Event()

    def interrupt() -> None:
        if not has_ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    def end_soon() -> None:
        """Interrupts the program unless it ends on its own, because its compute was ended."""
        timer = threading.Timer(PATIENCE_S, interrupt)
        timer.daemon = True
        timer.start()

    # as the adapter's own thread sees it
    program = Program(not breakpoints, has_ended.wait, interrupt)
    shared, server = _serving(lambda *_: program, breakpoints, port)
    started = threading.Event()
    shared.on_quit = end_soon
    thread = threading.Thread(target=server.run, args=(started.set,), name="page")
    with ends_by_signals():
        try:
            session = begin_debugged(log, force, "--force")
            thread.start()
            started.wait()
            shared.start(breakpoints, wait=False)
            show(server.address)
            debugger = shared.adapter.debugger
            try:
                with _may_quit(debugger), session, debugger:
                    run_program(command)
            finally:
                notice(f"log: {log}")
                has_ended.set()
            thread.join()
        finally:
            has_ended.set()
            shared.adapter.close()
            if thread.is_alive():
                server.stop()
                thread.join()


def _serving(
    make: Callable[..., Program], breakpoints: Sequence[str], port: int, model: str | None = None
) -> tuple[SharedRun, DebugServer]:
    """With a `model`, the page has a tab with its weights."""
    need("live")
    from llamacpp_instr.base.machine import usable_cpus
    from llamacpp_instr.debugger.page.server import DebugServer, SharedRun
    from llamacpp_instr.lab.view.tensors import Tensors
    from llamacpp_instr.lab.weights.measure import WeightReader

    for text in breakpoints:
        Breakpoint.parse(text)
    tensors = None
    if model is not None:
        file = load_model_file(model)
        tensors = Tensors((file, WeightReader(file)), None, usable_cpus())
    shared = SharedRun(make, tensors is not None)
    return shared, DebugServer(shared, port, tensors)


# --- a Python program in this process, as `python` would run it ---


def check_program(command: Sequence[str]) -> Sequence[str]:
    """`APP.py …` or `-m MODULE …`, without `python` before it. Raises `UsageError` for others."""
    if command and Path(command[0]).name in ("python", "python3"):
        command = command[1:]
    if not command:
        raise UsageError("no program is given; write it after --, as -- app.py")
    path = Path(command[0])
    if command[0] == "-m":
        if len(command) < 2:
            raise UsageError("-m needs the name of a module")
    elif not path.is_file():
        raise UsageError(f"{path} is not a file; give a Python program, or -m MODULE")
    return command


def run_program(command: Sequence[str]) -> None:
    """Run, to its end, what `check_program` returned. Raises what the program raises."""
    before = sys.argv, list(sys.path)
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            sys.path.insert(0, "")
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path.insert(0, str(Path(command[0]).resolve().parent))
            runpy.run_path(command[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


# --- a changed run beside the unchanged one ---


class Continuation(NamedTuple):
    """What a run generated, and from which logits."""

    tokens: Sequence[int]
    logits: npt.NDArray[np.float32]
    """(tokens, vocabulary) row i: what token i was chosen from"""


class Step(NamedTuple):
    """One generated token of both runs; None where a run had ended. It has figures if both had
    generated the same tokens so far: then their logits answer the same question."""

    before: int | None
    after: int | None
    divergence: float | None = None
    """Kullback-Leibler divergence of the changed run's probabilities from the unchanged ones, in
    nats: sum of p log(p/q)"""
    largest: float | None = None
    """the largest difference of a logit between the two runs"""


def compare(before: Continuation, after: Continuation) -> list[Step]:
    """Both continuations, token by token. Raises `UsageError` if their vocabularies differ."""
    for of in (before, after):
        if len(of.tokens) != len(of.logits):
            raise UsageError(f"{len(of.tokens)} tokens were chosen from {len(of.logits)} logits")
    if before.logits.shape[1:] != after.logits.shape[1:]:
        raise UsageError("the two runs are of models with different vocabularies")
    steps = list(starmap(Step, zip_longest(before.tokens, after.tokens)))
    for i, (step, p, q) in enumerate(zip(steps, before.logits, after.logits, strict=False)):
        largest = float(np.abs(p.astype(np.float64) - q).max())
        steps[i] = step._replace(divergence=divergence(p, q), largest=largest)
        if step.before != step.after:
            break
    return steps


def as_table(steps: Sequence[Step], texts: Mapping[int, str]) -> str:
    """The steps line by line; `texts` are those of their tokens."""
    lines = [f"{'':5}{'unchanged':>16}  {'changed':<16}  logits by  KL divergence, nats"]
    for number, step in enumerate(steps):
        before, after = (
            repr(texts[token]) if token is not None else "" for token in (step.before, step.after)
        )
        difference = ""
        if step.largest is not None:
            difference = f"{step.largest:9.3g}  {step.divergence:.3g}"
        lines.append(f"{number:4} {before:>16}  {after:<16}  {difference}".rstrip())
    return "\n".join(lines)


def as_json(steps: Sequence[Step], texts: Mapping[int, str]) -> dict[str, Any]:
    """The same for the page, with the number of the first token that differs."""
    differ = (number for number, step in enumerate(steps) if step.before != step.after)
    return {
        "firstDifference": next(differ, None),
        "steps": [
            {
                "number": number, "logitsBy": step.largest, "divergence": step.divergence,
                "before": None if step.before is None else texts[step.before],
                "after": None if step.after is None else texts[step.after],
            }
            for number, step in enumerate(steps)
        ],
    }  # fmt: skip


def divergence(before: Array, after: Array) -> float:
    """Kullback-Leibler divergence in nats of the probabilities that the logits `after` give from
    those that `before` give: the surprise of an observer who expects `after` and sees `before`."""
    p, q = log_soft_max(before), log_soft_max(after)
    return max(0.0, float(np.sum(np.exp(p) * np.where(np.isneginf(p), 0.0, p - q))))
