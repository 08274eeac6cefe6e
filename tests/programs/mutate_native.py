"""Small faults in the recorder's C and C++, one at a time: `make mutate-native`.

universalmutator's rules change a line: an operator, a number, an argument, a condition, or all of
it. For each mutant of a sample, ninja compiles what it changes in a build of its own. The tests of
what it changes run with that library, then all tests of the recorder, and then, if they all pass,
those of `make test-all PARTS=sanitizers`: a lock that is left out shows there alone. A mutant that
makes the same machine code as the original changes nothing and does not count. The rest should die.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

from llamacpp_instr.llama.build.source_tree import overlay_files, patches_dir
from tests.kit.native_kit import ROOT, MutableBuild, mutable_build
from tests.programs.sanitize import SANITIZERS

FIELDS = (
    "batches", "graphs", "facts", "machine", "times", "read_values", "sequences", "recording",
    "test_accounting.py::test_layers_are_the_sums_of_their_ops",
)  # fmt: skip
"""tests of every field, which any mutant must pass; the quick ones first"""
OTHERS = {
    "values": ("../debugger/test_stops.py",),
    "graph": ("every_architecture",),
    r"instrumentation\.cpp|memory": ("rotation", "unusual_calls"),
    "secrets|machine": ("secrets", "text"),
    "json|log": ("native", "text", "faults", "held_file", "stalls"),
    "ticks|ggml": ("ticks",),
    "file": ("held_file", "existing_log", "rotation", "faults"),
    "recorder|session|models|writer": (
        "rotation",
        "held_file",
        "existing_log",
        "faults",
        "stalls",
    ),
    "recorder|session|writer": ("concurrency", "native"),
}
"""tests of what these files do besides"""
RULES = ["universal.rules", "c_like.rules", "cpp.rules"]
NO_CODE = re.compile(r"\s*(//|#|$)")
NUMBER = re.compile(r"[\d)] $")
"""what is before an operator on numbers; `*`, `&` and `<` are parts of types otherwise"""
STATEMENT = re.compile(r"\s*(return\b|[\w.:>()\[\]-]+(\(| [-+|]?= |\+\+;|--;))")
"""what can be left out"""
LONGEST = 150
"""seconds of one test; a mutant that takes longer hangs"""
LONGEST_OF_ALL = 600
"""seconds of all tests of a mutant"""


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}\n    - {self.before.strip()}\n    + {self.after.strip()}"


def sources() -> list[str]:
    """Our files in the tree. Of the headers only that which formats lines: a change of another one
    compiles most files again."""
    files = (file.as_posix() for file in overlay_files(patches_dir()))
    return [file for file in files if file.endswith((".c", ".cpp", "-records.h"))]


def mutants(text: str, file: str) -> dict[int, list[Mutant]]:
    """By line."""
    from universalmutator.mutator import mutants_regexp

    lines = text.splitlines(keepends=True)
    found: dict[int, list[Mutant]] = {}
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # noqa: PTH123
        changes = mutants_regexp(lines, RULES, ignorePatterns=[])
    for number, after, *_ in changes:
        before = lines[number - 1]
        one_line = not NO_CODE.match(before) and after.count("\n") == 1
        if one_line and compiles(before, after):
            found.setdefault(number, []).append(Mutant(file, number, before, after))
    return found


def compiles(before: str, after: str) -> bool:
    """False for most of what the compiler would refuse: it costs as long as a mutant that counts.
    The rules know no types (`const char * name`, `uint64_t`) and no declarations."""
    pairs = zip(before, after, strict=False)
    at = next((at for at, (old, new) in enumerate(pairs) if old != new), 0)
    if after.lstrip().startswith("/*"):
        return STATEMENT.match(before) is not None
    if before[at] in "*&<>":
        return NUMBER.search(before[:at]) is not None
    return not (before[at].isdigit() and before[at - 1].isalpha()) and "(," not in after


def sample(build: MutableBuild, seed: int) -> Iterator[Mutant]:
    """Lines of all files in random order, with one mutant of each."""
    rng = random.Random(seed)
    by_line = [
        of_line
        for file in sources()
        for of_line in mutants((build.tree / file).read_text(), file).values()
    ]
    rng.shuffle(by_line)
    return (rng.choice(of_line) for of_line in by_line)


@contextmanager
def applied(build: MutableBuild, mutant: Mutant) -> Iterator[None]:
    path = build.tree / mutant.file
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    lines[mutant.line - 1] = mutant.after
    path.write_text("".join(lines))
    try:
        yield
    finally:
        path.write_text(text)


def tests_of(file: str) -> list[str]:
    others = [name for files, names in OTHERS.items() if re.search(files, file) for name in names]
    return [
        f"tests/recording/{name}" if ".py" in name else f"tests/recording/test_{name}.py"
        for name in dict.fromkeys((*FIELDS, *others))
    ]


def tested(build: MutableBuild, tests: Iterable[str]) -> str:
    """The first test that fails with the library as it is now; empty if none does."""
    hangs = ("-o", f"faulthandler_timeout={LONGEST}")
    status, printed = ended(
        "pytest", "-x", "-q", "-p", "no:cacheprovider", *hangs, *tests, **build.environment
    )
    failed = re.search(r"^(?:FAILED|ERROR) tests/(.+)", printed, re.MULTILINE)
    return "" if status == 0 else failed[1] if failed else f"exit status {status}"


def sanitized(mutant: Mutant) -> str:
    """The first sanitizer that finds a mutant; empty if none does."""
    for sanitizer in SANITIZERS:
        build = mutable_build(sanitizer)
        with applied(build, mutant):
            assert build.make() == 0
            library = build.environment["LLAMA_CPP_LIB_PATH"]
            command = ("tests.programs.sanitize", sanitizer, "--seconds", "2", "--library", library)
            status, printed = ended(*command)
            if status:  # one that does not end in time says nothing: sanitizers are slow
                return f"the {sanitizer} sanitizer ({printed.strip().splitlines()[-1][:100]})"
    return ""


def ended(module: str, *arguments: str, **environment: str) -> tuple[int | None, str]:
    """The exit status of a program of Python, None if it hangs, and what it printed."""
    command, env = [sys.executable, "-m", module, *arguments], {**os.environ, **environment}
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env | {"COLUMNS": "200"}, stdout=printed, stderr=printed,
            start_new_session=True,
        )  # fmt: skip
        status = None
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(LONGEST_OF_ALL)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a test that hangs has started
        printed.seek(0)
        return status, printed.read()


def verdict(build: MutableBuild, mutant: Mutant, pristine: dict[str, bytes]) -> tuple[str, str]:
    """What happened to a mutant, and the test that noticed."""
    with applied(build, mutant):
        if build.make() != 0:
            return "did not compile", ""
        if build.code() == pristine:
            return "same code", ""
        test = tested(build, tests_of(mutant.file)) or tested(build, ["tests/recording"])
    test = test or sanitized(mutant)
    return ("killed", test) if test else ("lived", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30, help="of mutants that compile")
    options = parser.parse_args()
    builds = [mutable_build(sanitizer) for sanitizer in ("", *SANITIZERS)]
    for each in builds:
        restore(each)
    build = builds[0]
    pristine = build.code()
    assert not (test := tested(build, ["tests/recording"])), f"{test} fails without a mutant"
    results: dict[str, Counter[str]] = {}
    tried = 0
    for mutant in sample(build, options.seed):
        if tried == options.count:
            break
        what, test = verdict(build, mutant, pristine)
        print(f"{what} by {test}: {mutant}" if test else f"{what}: {mutant}", flush=True)
        results.setdefault(Path(mutant.file).name, Counter())[what] += 1
        tried += what in ("killed", "lived")
    build.make()
    table(results)
    return 0


def restore(build: MutableBuild) -> None:
    """Compile our files as they are here: a run that was killed may have left a mutant."""
    for file in overlay_files(patches_dir()):
        text = (patches_dir() / "src" / file).read_bytes()
        if (build.tree / file).read_bytes() != text:
            (build.tree / file).write_bytes(text)
    assert build.make() == 0


def table(results: dict[str, Counter[str]]) -> None:
    columns = ("killed", "lived", "same code", "did not compile")
    print(f"\n{'':40}", *(f"{column:>15}" for column in columns))
    total = sum(results.values(), Counter())
    for name, counts in [*sorted(results.items()), ("all", total)]:
        print(f"{name:40}", *(f"{counts[column]:15}" for column in columns))
    changed = total["killed"] + total["lived"]
    print(f"\n{total['killed']} of {changed} that change the code were killed")


if __name__ == "__main__":
    sys.exit(main())
