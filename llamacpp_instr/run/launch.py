"""A run that an editor launches: a launch configuration, checked as the command line checks its
options, and the model in a thread of its own."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.debugger.control import Debugger
from llamacpp_instr.debugger.dap.requests import parse
from llamacpp_instr.llama.engine import ContextOptions
from llamacpp_instr.llama.generate import Sampling
from llamacpp_instr.llama.log import Interrupt
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.recording.session import check_log_path, fresh_log
from llamacpp_instr.run.session import RunOptions, run

DEFAULT_LOG = Path("debug.log")


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


class Launched:
    """A run that was checked and has not begun; `launch` returns one."""

    def __init__(
        self,
        launch: Launch,
        options: RunOptions,
        debugger: Debugger,
        emit: Callable[[str], None],
        notice: Callable[[str], None],
    ) -> None:
        self.stop_on_entry = launch.stop_on_entry and not launch.no_debug
        """whether its first op is a stop"""
        self._debugger = None if launch.no_debug else debugger
        self.options = options
        self._emit, self._notice = emit, notice
        self._interrupt = Interrupt()

    def run(self) -> None:
        """Run the model to its end; its log is whole then. Raises `InstrError` if that failed,
        `KeyboardInterrupt` after `interrupt`."""
        out = cast(BinaryIO, _TextStream(self._emit))
        log = run(self.options, out, self._notice, self._debugger, self._interrupt)
        self._notice(f"log: {log}")

    def interrupt(self) -> None:
        """End the run soon; called by another thread."""
        self._interrupt.request()


def launch(
    arguments: dict[str, Any],
    model: str | None,
    prompt: str | None,
    debugger: Debugger,
    emit: Callable[[str], None],
    notice: Callable[[str], None],
) -> Launched:
    """The run that a launch configuration describes; `model` and `prompt` are those of the command
    line, for one without. `emit` gets the text of the model, `notice` lines about the progress.

    Editors add keys of their own, which are ignored, but a key that looks like one of ours is
    refused. Raises `UsageError` for that, and for what the command line refuses.
    """
    _check_keys(arguments)
    wanted = parse("launch", arguments, Launch)
    if wanted.log == "-":
        raise UsageError("launch: the log must be a file; standard output carries the protocol")
    log = Path(wanted.log) if wanted.log else None
    log = log or (DEFAULT_LOG if wanted.force else fresh_log(DEFAULT_LOG))
    prompt = prompt if wanted.prompt is None else wanted.prompt
    if prompt is None:
        raise UsageError('launch: no prompt is given; add the key "prompt"')
    options = RunOptions(
        model=wanted.model or model or "",
        prompts=[prompt],
        log=log,
        n=wanted.n,
        level=wanted.level,
        sampling=msgspec.convert(wanted, Sampling, from_attributes=True).with_seed(),
        context=msgspec.convert(wanted, ContextOptions, from_attributes=True),
        mmap=wanted.mmap,
        chat=wanted.chat,
        force=wanted.force,
    )
    options.check()
    load_model_file(options.model).check_has_weights()
    check_log_path(log, options.force, '"force": true')
    return Launched(wanted, options, debugger, emit, notice)


def in_keys(text: str) -> str:
    """The text with the key of a launch configuration in place of each option that it names."""

    def key(option: re.Match[str]) -> str:
        name = option[1] + option[2].title().replace("-", "")
        return f'"{name}"' if name in KEYS else option[0]

    return _OPTION.sub(key, text)


def _check_keys(arguments: dict[str, Any]) -> None:
    for key in arguments:
        if key in KEYS or key in _EDITORS_OWN or key.startswith("__"):
            continue
        if near := difflib.get_close_matches(key, KEYS, 1, 0.75):
            raise UsageError(f"launch: {key[:60]!r} is not a key; did you mean {near[0]!r}?")


class _TextStream(io.RawIOBase):
    """Calls a function with the text that is written; each piece has whole characters."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._emit(bytes(data).decode(errors="replace"))
        return len(data)
