"""What `instr bench` measures: llama-bench's tests with this package's library, for several models,
numbers of threads and depths of the context.

Invariant: all configurations take turns, so that other load on the machine affects all of them
alike. Each round of a configuration has its own log, which is whole even after Ctrl-C. Decodes that
warm up, or fill the context before a test, are marked as warm-up and do not count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.machine import cpu_frequencies, cpu_limit, machine_memory, usable_cpus
from llamacpp_instr.base.output import check_output
from llamacpp_instr.base.system import temporary_directory
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.analyses.bench import OURS, Repetition
from llamacpp_instr.converters.analyses.compare import short_names
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.log import Interrupt
from llamacpp_instr.llama.threads import default_threads
from llamacpp_instr.log.session import WARM_UP, Session, load_session
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.recording.memory.plan import check_memory, dry_context_log, in_a_child
from llamacpp_instr.recording.session import Recording, fresh_log
from llamacpp_instr.run.compare import (
    check_rounds,
    kept_in,
    models_of_types,
    quantize_models,
    take_turns,
)
from llamacpp_instr.run.session import RunOptions, load_library, record_model, text_context

DEFAULT_LOGS = Path("bench")


@dataclass(frozen=True)
class BenchOptions:
    """The options of `instr bench`."""

    prompts: Sequence[int]
    """the length of each prompt, in tokens"""
    tokens: Sequence[int]
    """the number of tokens that each of the other tests decodes one by one"""
    depths: Sequence[int]
    """tokens in the context before a test"""
    threads: Sequence[int]
    """empty for the physical cores"""
    rounds: int
    force: bool

    @property
    def tests(self) -> list[tuple[int, int]]:
        """The tokens of the prompt, and those decoded one by one; one of the two is 0."""
        return [(n, 0) for n in self.prompts if n] + [(0, n) for n in self.tokens if n]

    def check(self, models: Sequence[ModelFile]) -> None:
        """Raise `UsageError` if there is no test, or if one does not fit one of the models."""
        check_rounds(self.rounds)
        if not self.tests:
            raise UsageError("-p 0 and -n 0 leave nothing to measure")
        depth, longest = max(self.depths), max(map(max, self.tests))
        for model in models:
            if model.trained_tokens and depth + longest > model.trained_tokens:
                raise UsageError(
                    f"a test of {longest:,} tokens at depth {depth:,} exceeds the context of"
                    f" {model.trained_tokens:,} tokens that {model.path} was trained on; make -p,"
                    " -n or -d smaller"
                )


@dataclass(frozen=True)
class Configuration:
    """One of the settings that take turns, with its log of each round."""

    model: str
    """a short name"""
    file: Path
    context: ContextOptions
    depth: int
    logs: Sequence[Path]


Measured = list[tuple[str, list[Session]]]
"""the short name of a model, and the session of each round"""


def run_bench(
    models: Sequence[str],
    types: Sequence[str],
    options: BenchOptions,
    directory: Path | None,
    notice: Callable[[str], None],
    on_progress: OnProgress,
) -> tuple[Measured, bool]:
    """Measure all configurations, with logs in `directory`, by default a new one; returns the
    sessions of each, and whether Ctrl-C ended the measurement. With `types`, the only model is
    quantized to each of them. `notice` is called with a line before each stage, `on_progress` with
    the number of logs written and the total.

    Raises `UsageError` for what cannot be measured, before a log is written; `InstrError` if a
    compute fails.
    """
    files = [load_model_file(name) for name in models]
    if types and len(files) > 1:
        raise UsageError("--types takes one MODEL: it quantizes it")
    options.check(files)
    directory = directory or fresh_log(DEFAULT_LOGS)
    with ExitStack() as stack:
        if types:
            folder = stack.enter_context(temporary_directory("instr-bench-"))
            paths = models_of_types(files[0], types, folder)
        else:
            every = [file.path for file in files]
            paths = dict(zip(short_names(every, every), every, strict=True))
            if len(paths) < len(files):
                raise UsageError("a model is given twice; name each once")
        configurations = _configure(paths, options, directory)
        load_library(Interrupt())
        if types:
            quantize_models(files[0], paths, options.force, notice)
        for file, ctx in dict.fromkeys((of.file, of.context.ctx) for of in configurations):
            # each is checked before the first one runs
            model = load_model_file(file)
            check_memory(model, ContextOptions(ctx=ctx))
            in_a_child(_check_decodes, model)
        kept_in("--logs", directory)
        written, interrupted = _measure(configurations, options, notice, on_progress)
    measured: Measured = []
    for of, logs in zip(configurations, written, strict=True):
        sessions = [load_session(log, computes=False) for log in logs]
        if any(session.notes for session in sessions):
            measured.append((of.model, sessions))
    return measured, interrupted


def _check_decodes(model: ModelFile) -> None:
    """Raise `UsageError` for a model that cannot be tested. Runs where no session is recorded."""
    with dry_context_log(model) as (dry, _), text_context(dry, ContextOptions(ctx=1)):
        if dry.has_encoder:
            raise UsageError(f"{model.path} has an encoder; instr bench measures only decoders")


def _configure(
    models: Mapping[str, Path], options: BenchOptions, directory: Path
) -> list[Configuration]:
    """The configurations of models by their short names; the model varies slowest. Raises
    `UsageError` for a log that must not be written."""
    threads = options.threads or [default_threads()]
    longest = max(map(max, options.tests))
    found = []
    for (model, file), n_threads, depth in product(models.items(), threads, options.depths):
        words = [re.sub(r"[^\w.]+", "-", model).strip("-")]
        words += [f"t{n_threads}"] * (len(threads) > 1) + [f"d{depth}"] * (len(options.depths) > 1)
        logs = [directory / f"{'-'.join(words)}-{i + 1}.log" for i in range(options.rounds)]
        context = ContextOptions(ctx=depth + longest, threads=n_threads)
        context.check()
        found.append(Configuration(model, file, context, depth, logs))
    if directory.exists():
        for log in (log for of in found for log in of.logs):
            check_output(log, options.force)
    return found


def _measure(
    configurations: Sequence[Configuration],
    options: BenchOptions,
    notice: Callable[[str], None],
    on_progress: OnProgress,
) -> tuple[list[list[Path]], bool]:
    """The logs written for each configuration, and whether Ctrl-C ended the measurement."""
    written: list[list[Path]] = [[] for _ in configurations]

    def once(i: int, turn: int) -> None:
        on_progress(turn * len(configurations) + i, options.rounds * len(configurations))
        of = configurations[i]
        chosen = RunOptions(
            str(of.file), (), of.logs[turn], context=of.context, force=options.force
        )  # fmt: skip

        def work(model: LoadedModel, session: Recording) -> None:
            with text_context(model, of.context) as context:
                model.log.release()  # the input is valid
                session.take_name()
                written[i].append(of.logs[turn])
                _repeat(context, session, of, options)

        record_model(of.file, chosen, work, Interrupt())

    try:
        names = [of.logs[0].stem.removesuffix("-1") for of in configurations]
        take_turns(names, options.rounds, once, notice)
    except KeyboardInterrupt:
        return written, True
    return written, False


def _repeat(
    context: ModelContext, session: Recording, of: Configuration, options: BenchOptions
) -> None:
    """One repetition of each test."""
    n_vocab, n_batch = context.model.n_vocab, context.n_batch

    def compute(n_tokens: int, at_once: int) -> int:
        tokens = [n_vocab * i // n_tokens for i in range(n_tokens)]
        return context.time_decodes(
            [tokens[i : i + at_once] for i in range(0, n_tokens, at_once)]
        )  # fmt: skip

    with session.mark(WARM_UP):
        compute(max(options.prompts), n_batch)
        context.clear()
        compute(1, 1)
    context.clear()
    is_deep = of.depth == 0
    for number, (n_prompt, n_gen) in enumerate(options.tests, 1):
        if not (is_deep and context.keep(of.depth)):
            context.clear()  # some memories cannot forget only the last tokens
            with session.mark(WARM_UP):
                compute(of.depth, n_batch)
            is_deep = True
        test = Repetition(number, n_prompt, n_gen, of.depth, of.context.threads or 0, 0)
        with session.mark(test.name):
            ns = compute(n_prompt or n_gen, n_batch if n_prompt else 1)
        session.note(OURS, msgspec.to_builtins(msgspec.structs.replace(test, ns=ns)))


def machine_facts() -> dict[str, tuple[str | float, Literal["text", "count", "number", "bytes"]]]:
    """What a speed depends on but its log lacks, with units, as far as the system reports it."""
    facts: dict[str, tuple[str | float, Literal["text", "count", "number", "bytes"]]] = {
        "usable processors": (usable_cpus(), "count"),
        "usable physical cores": (default_threads(), "count"),
    }
    if (limit := cpu_limit()) is not None:
        facts["CPU limit of the container"] = limit, "number"
    if (memory := machine_memory()) is not None:
        facts["usable memory"] = memory, "bytes"
    facts |= {what: (text, "text") for what, text in cpu_frequencies().items()}
    return facts
