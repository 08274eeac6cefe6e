"""Runs a model on prompts and records the session: the work of `instr run`.

Wrong input is refused before anything is computed, and then leaves no log.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from llamacpp_instr.base.errors import InstrError, UsageError
from llamacpp_instr.base.output import check_not_input
from llamacpp_instr.base.terminal import abandon_standard_output, notice, write_text
from llamacpp_instr.debugger.stop import Debugger, Go
from llamacpp_instr.llama import native
from llamacpp_instr.llama.crashes import last_words
from llamacpp_instr.llama.devices import ANYWHERE, Placement
from llamacpp_instr.llama.engine import ComputeError, ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.generate import Sampler, Sampling, check_prompt, embed, generate, tokenize
from llamacpp_instr.llama.log import Interrupt, captured
from llamacpp_instr.log.schema import LEVELS
from llamacpp_instr.model.adapter import Adapter, check_adapter
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.recording.memory.plan import check_memory
from llamacpp_instr.recording.session import (
    LogPipe,
    OnLogError,
    Recording,
    begin_session,
    check_choice,
    fresh_log,
)

DEFAULT_LOG = Path("session.log")


@dataclass(frozen=True)
class RunOptions:
    """The options of `instr run`."""

    model: str
    prompts: Sequence[str]
    log: Path | None = None
    """`-` is standard output. The default is DEFAULT_LOG with `force`, else a fresh name like it"""
    n: int = 128
    """maximum number of tokens to generate"""
    level: str = "detailed"
    stats: str | None = None
    stop_on_nan: bool = False
    capture: str | None = None
    """nodes whose values go to the directory `output`; the `debugger` of `run` writes them"""
    output: Path | None = None
    sampling: Sampling = field(default_factory=Sampling)
    context: ContextOptions = field(default_factory=ContextOptions)
    lora: Sequence[Adapter] = ()
    placement: Placement = ANYWHERE
    mmap: bool = True
    chat: bool = False
    embed: bool = False
    repeat: int = 1
    prefill: int | None = None
    """tokens of the vocabulary that replace the prompt, fewer if `n` needs the room; the text does
    not stop at the model's end token, so that all runs have the same steps"""
    on_log_error: OnLogError = "continue"
    force: bool = False

    def check(self) -> None:
        """Raise `UsageError` for a value that is wrong for every model."""
        self.sampling.check()
        self.context.check()
        check_choice("level", self.level, LEVELS)
        if self.n < 0:
            raise UsageError(f"-n is {self.n}; it must be 0 or more")
        if self.repeat < 1:
            raise UsageError(f"--repeat is {self.repeat}; it must be 1 or more")
        if not self.prompts:
            raise UsageError(
                "no prompt is given; use --prompt TEXT or --prompt-file FILE; - is standard input"
            )
        if len(self.prompts) > 1 and not self.embed:
            raise UsageError("several prompts can be given only with --embed")
        if self.chat and self.embed:
            raise UsageError("--chat and --embed exclude each other")
        if self.stop_on_nan and not self.stats:
            raise UsageError("--stop-on-nan needs --stats PATTERN, the tensors to look at")
        if (self.capture is None) != (self.output is None):
            raise UsageError("--capture PATTERN and --output DIR need each other")
        if self.capture is not None and self.stats:
            raise UsageError("--capture and --stats exclude each other: both read values at nodes")


def run(
    options: RunOptions,
    out: BinaryIO,
    notice: Callable[[str], None] = notice,
    debugger: Debugger | None = None,
    interrupt: Interrupt | None = None,
) -> Path:
    """Run the model, write its text (or JSON arrays) to `out` as it is generated; returns the
    log's path. If `out` is a terminal, control characters of the text are escaped.

    `notice` is called with lines about the progress; by default it prints them to standard error.
    `debugger` may stop the computes; if it ends one, the run ends without an error. `interrupt` can
    end it from another thread. Raises `UsageError` for wrong input, `NativeError` without the
    patched library, `InstrError` if a compute fails or the log is incomplete.
    """
    options.check()
    file = load_model_file(options.model)
    file.check_has_weights()
    path = file.path
    if options.log is not None:
        check_not_input(options.log, *file.headers, *(of.path for of in options.lora))
    for of in options.lora:
        check_adapter(of.path, file)
    interrupt = interrupt or Interrupt()
    load_library(interrupt)
    options.placement.check()
    for warning in check_memory(file, options.context, options.mmap, options.placement):
        notice(warning)
    prompts = tokenize(path, options.prompts, chat=options.chat)

    def work(model: LoadedModel, session: Recording) -> None:
        loaded = _Run(options, prompts, model, session, out, notice)
        (loaded.embed if options.embed else loaded.text)()

    return record_model(path, options, work, interrupt, debugger)


def load_library(interrupt: Interrupt) -> None:
    """Load the patched library. Raises `NativeError` without it."""
    with interrupt.watching(), interrupt.deferred():
        native.load()  # an interrupted import raises a misleading error, so Ctrl-C waits


def record_model(
    path: Path,
    options: RunOptions,
    work: Callable[[LoadedModel, Recording], object],
    interrupt: Interrupt,
    debugger: Debugger | None = None,
) -> Path:
    """Load the model at `path` in a session and do `work` with both; returns the log's path. Only
    those `options` count that concern the model and the log. Raises like `run`."""
    log = options.log or default_log(options.force)
    options = replace(options, log=log)
    with _destination(log) as target, interrupt.watching(), captured(interrupt) as llama_log:
        # enough to repeat the run, prompts included
        args = {key: value for key, value in asdict(options).items() if value is not None}
        session = begin_session(
            target, level=options.level, stats=options.stats, args=args, force=options.force,
            force_option="--force", aside=True, stop_on_nan=options.stop_on_nan,
            on_log_error=options.on_log_error, debugged=debugger is not None,
        )  # fmt: skip

        def about() -> tuple[str, int]:
            if not llama_log.released:  # loading failed: the file is wrong, and leaves no log
                session.discard()
                return str(path), 2
            return f"{path}, recorded in {'standard output' if str(log) == '-' else log}", 1

        try:
            with (
                last_words(about),
                debugger or nullcontext(),
                LoadedModel(path, llama_log, options.mmap, options.placement) as model,
            ):
                model.use(options.lora)
                work(model, session)
        except UsageError:
            session.close()
            session.discard()
            raise
        except BrokenPipeError:
            abandon_standard_output()
            raise InstrError(f"the output was closed; stopped, log: {log}") from None
        except ComputeError:
            if debugger is not None and debugger.go is Go.QUIT:
                return log
            if session.nan_seen and options.stop_on_nan:
                raise InstrError(
                    f"stopped: a tensor that {options.stats!r} matches held a NaN; see "
                    f"`instr cat --event tensor_stats {log}`"
                ) from None
            raise
        finally:
            session.close()
            if session.is_aside:
                session.discard()
        if session.problem:
            raise InstrError(session.problem)
    return log


def default_log(force: bool, name: Path = DEFAULT_LOG) -> Path:
    """The log of a session for which none is named: a fresh name unless it may be replaced."""
    return name if force else fresh_log(name)


@contextmanager
def _destination(log: Path) -> Iterator[Path]:
    """Where the recorder writes: the log itself, or a pipe to standard output."""
    if str(log) != "-":
        yield log
        return
    pipe = LogPipe(_print)
    try:
        with pipe:
            yield pipe.path
    finally:
        if pipe.error is not None:
            abandon_standard_output()
            reason = pipe.error.strerror
            raise InstrError(f"the log cannot be written to standard output: {reason}") from None


def _print(piece: bytes) -> None:
    while piece:  # without Python's buffer, whose lock would be held while nothing reads
        piece = piece[os.write(sys.stdout.fileno(), piece) :]


@dataclass(frozen=True)
class _Run:
    """A run whose model is loaded."""

    options: RunOptions
    prompts: Sequence[Sequence[int]]
    model: LoadedModel
    session: Recording
    out: BinaryIO
    notice: Callable[[str], None]

    def text(self) -> None:
        options, model = self.options, self.model
        [prompt] = self.prompts
        with text_context(model, options.context) as context:
            if model.has_encoder and model.start_token < 0:
                raise UsageError(f"{model.path} does not say which token its decoder starts with")
            if options.prefill:
                n = max(min(options.prefill, context.size - options.n), 1)
                prompt = [model.n_vocab * i // n for i in range(n)]
            check_prompt(context, prompt)

            def once() -> None:
                context.clear()
                with (
                    Sampler(context, options.sampling) as sampler,
                    _text_written(model, self.out) as write,
                ):
                    finish = generate(
                        context, prompt, sampler, options.n, write,
                        stop_at_end=not options.prefill,
                    )  # fmt: skip
                if finish == "context":
                    full = f"the context of {context.size} tokens is full"
                    self.notice(f"{full}; --ctx makes a larger one")

            self._repeat(once)

    def embed(self) -> None:
        longest = max(1, *map(len, self.prompts))
        with ModelContext(self.model, self.options.context, embed_tokens=longest) as context:
            for prompt in self.prompts:
                check_prompt(context, prompt)

            def once() -> None:
                for prompt in self.prompts:
                    self.out.write(json.dumps(embed(context, prompt)).encode() + b"\n")
                    self.out.flush()

            self._repeat(once)

    def _repeat(self, once: Callable[[], None]) -> None:
        self.model.log.release()  # the input is valid
        self.session.take_name()
        count = self.options.repeat
        for number in range(count):
            name = "warm-up" if number == 0 and count > 1 else f"run {max(number, 1)}"
            if count > 1:
                self.notice(name)
            with self.session.mark(name):
                once()


@contextmanager
def text_context(model: LoadedModel, options: ContextOptions) -> Iterator[ModelContext]:
    """A context of a model that generates text. Raises `UsageError` for any other model."""
    if model.is_diffusion:
        raise UsageError(
            f"{model.path} is a diffusion model: it does not generate text from left to right, "
            "as this command does; `instr run --embed` runs a prompt through it"
        )
    encoder = f"{model.path} is an encoder and generates no text; use `instr run --embed`"
    if not model.has_decoder:
        raise UsageError(encoder)
    with ModelContext(model, options) as context:
        if not context.memory:
            raise UsageError(encoder)
        yield context


@contextmanager
def _text_written(model: LoadedModel, out: BinaryIO) -> Iterator[Callable[[int], None]]:
    """Writes tokens as text as soon as their characters are complete; the block's end, the rest."""
    # bytes that cannot become a character are replaced
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(token: int) -> None:
        if text := decoder.decode(model.piece(token)):
            write_text(out, text)

    try:
        yield write
    finally:
        write_text(out, decoder.decode(b"", final=True) + "\n")
