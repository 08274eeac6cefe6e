"""Makes every number in a model's metadata large, and checks that this takes no memory and time.

    python -m tests.programs.claims [--quick] [NAME ...]     models of upstream's test; default: all

Each 32-bit number, and each array of them, is set to each of `VALUES` in a copy of the model; every
other key that llama.cpp knows is added. With `--quick`, a number gets one of the first two values,
and a part of the keys is added, each to one of the models. Models that `check_memory` accepts are
loaded and compute a prompt, once for text and once for embeddings. In no case may the process take
`MOST` bytes more than with the original model, or more than `SECONDS`. Each case is forked from a
process that has loaded the library, so this needs `fork`. Lists the findings; exits with status 1
if there are any.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf

from llamacpp_instr.base.errors import InstrError
from llamacpp_instr.llama import native
from llamacpp_instr.llama.engine import ContextOptions, LoadedModel, ModelContext
from llamacpp_instr.llama.log import Interrupt, captured
from llamacpp_instr.model.file import load_model_file
from llamacpp_instr.model.header import read_header
from llamacpp_instr.recording.memory.breakdown import MAPPED
from llamacpp_instr.recording.memory.plan import MAX_BYTES, dry_run
from tests.kit.native_kit import patched_tree, random_models

VALUES = (0, 1 << 24, 1 << 31)
"""values for the numbers; keys that are added are not set to 0"""

FEWER = 4
"""with `--quick`, of how many keys one is added"""

MOST = 512 << 20
"""bytes that a case may take, or be predicted to take, beyond the original model: a context of 4096
tokens is a valid default, and takes about 300 MiB for some of these"""

SECONDS = 60
"""time limit for each case; they take hundredths"""

ENDS = ("refused", "computed", "died while planning", "was ended by llama.cpp while computing")
"""the correct results; `instr run` turns the last two into one line: tests/llama/test_crashes.py"""

OPTIONS = ContextOptions(threads=1)
PROMPT = 8

ALIGNMENT = 32
"""GGUF's default, which these models use"""

_NUMBERS = (gguf.GGUFValueType.UINT32, gguf.GGUFValueType.INT32)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer claims: see above")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments)
    os.environ["GGML_NO_BACKTRACE"] = "1"
    native.load()
    paths = sorted(random_models().glob("*.gguf"))
    paths = [path for path in paths if not options.names or path.stem in options.names]
    found, ends = [], Counter[str]()
    for n, path in enumerate(paths):
        keys = sorted(known_keys())
        added = keys[n :: FEWER * len(paths)] if options.quick else keys
        for end, finding in try_model(path, options.quick, added):
            ends[end] += 1
            if finding:
                found.append(finding)
                print(finding, flush=True)
    counts = ", ".join(f"{count:,} {end}" for end, count in ends.most_common())
    print(f"{ends.total():,} claims: {counts}; {len(found)} findings")
    return 1 if found or not ends else 0


def try_model(path: Path, quick: bool, added: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The result of each case of a model, and a line with the finding, or an empty string."""
    data = path.read_bytes()
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / path.name
        copy.write_bytes(data)
        end, held = _try(copy)
        length = read_header(path).data_start
        tensors = data[length:]
        # some of the original models cannot compute embeddings
        assert end in (ENDS[1], ENDS[3]), f"{path.name}: {end}"
        for key, value, header in claims(path, data, quick, added):
            with copy.open("r+b") as file:
                file.write(header)
                if len(header) != length:  # only then does the data move
                    length = len(header)
                    file.write(tensors)
                    file.truncate()
            end, now = _try(copy)
            wrong = now - held > MOST or end not in ENDS
            finding = f"{path.stem}: {key} = {value}: {end}, {now - held >> 20} MiB more"
            yield end, finding if wrong else ""


def claims(
    path: Path, data: bytes, quick: bool, added: Sequence[str]
) -> Iterator[tuple[str, int, bytes]]:
    """Keys of a model and those `added`, the value of each, and the new beginning of the file."""
    end = read_header(path).data_start
    for n, (key, at, count) in enumerate(numbers_of(path, data)):
        for value in VALUES[n % 2 : n % 2 + 1] if quick else VALUES:
            yield key, value, data[:at] + _u32(value) * count + data[at + 4 * count : end]
    fields = gguf.GGUFReader(path).fields
    arch = fields["general.architecture"].contents()
    for key in sorted({f"{arch}.{name}" for name in added} - set(fields)):
        for value in VALUES[1 : 2 if quick else None]:
            yield key, value, with_entry(data[:end], key, value)


def numbers_of(path: Path, data: bytes) -> Iterator[tuple[str, int, int]]:
    """Key, offset and count of the 32-bit numbers in the file's metadata."""
    for key, field in gguf.GGUFReader(path).fields.items():
        if key.startswith("GGUF.") or not field.types or field.types[-1] not in _NUMBERS:
            continue
        at = data.index(_text(key)) + len(_text(key)) + 4
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            yield key, at + 12, int.from_bytes(data[at + 4 : at + 12], "little")
        else:
            yield key, at, 1


@functools.cache
def known_keys() -> set[str]:
    """The keys that llama.cpp looks up, without the architecture."""
    source = patched_tree() / "src" / "llama-arch.cpp"
    return set(re.findall(r'"%s\.([a-z0-9_.]+)"', source.read_text()))


def with_entry(header: bytes, key: str, value: int) -> bytes:
    """A model's header with one more entry, and another that keeps the tensors aligned."""
    entry = _text(key) + _u32(gguf.GGUFValueType.UINT32) + _u32(value)
    filler = _text("general.description") + _u32(gguf.GGUFValueType.STRING)
    n = -(len(entry) + len(filler) + 8) % ALIGNMENT
    entry += filler + _text("." * n)
    begin = len("GGUF") + 4 + 8 + 8
    count = int.from_bytes(header[begin - 8 : begin], "little") + 2
    return header[: begin - 8] + count.to_bytes(8, "little") + entry + header[begin:]


def _text(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _try(path: Path) -> tuple[str, int]:
    """The result of a case, and its peak memory in bytes, measured or predicted."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _be_a_case(path, writing)
    os.close(writing)
    with os.fdopen(reading) as stages:
        *_, (end, predicted) = [("was killed", "0"), *(line.split("\t") for line in stages)]
    _, status, usage = os.wait4(child, 0)
    if os.WIFSIGNALED(status):
        end = _how_it_died(os.WTERMSIG(status), end)
    # Linux counts in kilobytes
    return end, max(usage.ru_maxrss << 10, int(predicted))


def _how_it_died(number: int, during: str) -> str:
    if number == signal.SIGALRM:
        return f"did not end {during}"
    if during == "planning":  # in any way: planning runs in a child for this reason
        return "died while planning"
    how = (
        "ended by llama.cpp"
        if number == signal.SIGABRT
        else f"ended by {signal.Signals(number).name}"
    )
    return f"was {how} while {during}"


def _be_a_case(path: Path, writing: int) -> None:
    """In the child: plan, then run, and report each stage; never returns."""
    signal.alarm(SECONDS)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    predicted = 0

    def tell(what: str) -> None:
        os.write(writing, f"{what}\t{predicted}\n".encode())

    tell("planning")
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, resource.RLIM_INFINITY))
        plan = dry_run(load_model_file(path), OPTIONS, mmap=True)
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
        predicted = sum(use.n_bytes for use in plan.uses if use.buffer != MAPPED)
        tell("computing")
        if predicted < MOST:
            _compute(path)
            tell("computed")
    except InstrError:
        tell("refused")
    except BaseException as error:
        tell(repr(error))
    os._exit(0)


def _compute(path: Path) -> None:
    with captured(Interrupt()) as log, LoadedModel(path, log) as model:
        for embed_tokens in (0, PROMPT):
            with ModelContext(model, OPTIONS, embed_tokens) as context:
                prompt = [1] * PROMPT
                if not context.memory and not embed_tokens:
                    continue
                if model.has_encoder:
                    context.encode(prompt)
                if model.has_decoder:
                    context.decode(prompt)
                if embed_tokens:
                    context.embedding(PROMPT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
