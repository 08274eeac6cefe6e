"""Imports a model: starts llama.cpp's converter in a child process and follows it.

Invariant: what can be seen to be wrong is refused before the child starts, and the file gets its
name once it is complete. Nothing that happens to the child ends this process.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamacpp_instr.build.cache import own_cache
from llamacpp_instr.errors import InstrError, UsageError
from llamacpp_instr.importer.converter import find_converter
from llamacpp_instr.importer.libraries import check_libraries
from llamacpp_instr.importer.source import Kind, Source
from llamacpp_instr.isolated import python
from llamacpp_instr.model.file import ModelFile, load_model_file
from llamacpp_instr.output import check_model_output, new_model
from llamacpp_instr.progress import OnProgress
from llamacpp_instr.temporary import temporary_directory
from llamacpp_instr.terminal import printable, shortened

_TICK_SECONDS = 0.5


def import_model(
    source: Source,
    output: Path,
    type_: str | None = None,
    *,
    force: bool = False,
    on_progress: OnProgress = lambda _done, _total: None,
) -> ModelFile | None:
    """Write the model or adapter of `source` to `output`; returns the model, None for an adapter.

    `type_` is F16, BF16, F32 or Q8_0; None means BF16 if the weights are BF16, else F16, and for
    an adapter F32. `on_progress` gets bytes. Raises UsageError for what cannot be imported,
    BuildError if the converter cannot be fetched, InstrError if it fails.
    """
    check_libraries()
    check_model_output(output, force)
    converter = find_converter()
    with new_model(output, force) as temporary, temporary_directory("instr-import-") as staging:
        _run(
            {
                "kind": source.kind.name,
                "source": str(source.path),
                "weights": [str(file) for file in source.weights],
                "base": str(source.base),
                "type": type_,
                "output": str(temporary),
                "staging": str(staging),
                "converter": str(converter),
            },
            source,
            on_progress,
        )
        if source.kind is Kind.LORA:
            return None
        try:
            return load_model_file(temporary)
        except UsageError as error:
            raise InstrError(f"llama.cpp's converter wrote an incomplete model: {error}") from None


def _run(request: dict[str, Any], source: Source, on_progress: OnProgress) -> None:
    log = own_cache() / "logs" / f"import-{source.path.resolve().name}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            python(f"from {__package__}.worker import main; main()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            # Ctrl-C is for this process, which then ends the child
            start_new_session=True,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
    assert process.stdin
    try:
        with contextlib.suppress(BrokenPipeError):  # the child died: its answers tell why
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        done = total = 0
        for kind, *values in _answers(process):
            if kind == "progress":
                done, total = values
            elif kind == "error":
                raise (UsageError if values[1] == 2 else InstrError)(values[0])
            elif kind == "failed":
                raise _failure(source, log, *values)
            elif kind == "done":
                return
            on_progress(done, total)
        raise _death(process.wait(), source, log)
    finally:
        process.kill()
        with contextlib.suppress(BrokenPipeError), process:
            pass


def _answers(process: subprocess.Popen[bytes]) -> Iterator[list[Any]]:
    """The answers of the child until it ends, and `["tick"]` while there is none."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def receive() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.put(line)
        lines.put(b"")

    threading.Thread(target=receive, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=_TICK_SECONDS)
        except queue.Empty:
            yield ["tick"]
            continue
        if not line:
            return
        yield json.loads(line)


def _failure(source: Source, log: Path, name: str, text: str, number: int | None) -> InstrError:
    """The error for an exception of the converter: nearly always the folder is the cause."""
    if number == errno.ENOSPC:
        return InstrError(f"{source.path}: the disk is full")
    if "pre-tokenizer was not recognized" in text:
        return UsageError(
            f"{source.path}: llama.cpp's converter does not know this tokenizer (its BPE "
            "pre-tokenizer has an unknown hash)"
        )
    reason = next((line.strip() for line in text.splitlines() if line.strip()), name)
    if name in ("KeyError", "AssertionError", "AttributeError", "TypeError", "IndexError"):
        reason = f"{name}: {reason}" if reason != name else name
    return UsageError(
        f"{source.path} cannot be imported: {printable(shortened(reason))}; "
        f"the converter's log is {log}"
    )


def _death(code: int, source: Source, log: Path) -> InstrError:
    """The error if the child died: its exit and the last line of its log."""
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = printable(shortened(said[-1].strip())) if said else "without a message"
    return InstrError(
        f"{source.path}: llama.cpp's converter died ({how}): {last}; its log is {log}"
    )
