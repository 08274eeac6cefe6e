"""Runs README's first commands as a stranger: `make demo` and `make test` in an empty home.

    python -m tests.programs.stranger                 the attempts that are missing at this commit
    python -m tests.programs.stranger idle busy       only those of these kinds
    python -m tests.programs.stranger --table         print the table of all attempts

Each attempt clones the commit into a new directory, with an empty home and no cache, and removes
both. Its row goes to docs/explanation/stranger.jsonl at once, so the attempts of several days make
one table; a red one stays in it. Ctrl-C ends an attempt without a row. Run it as root: one kind of
attempt is another user's.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.kit.native_kit import ROOT
from tests.parts.newcomer.newcomer import pip_settings

ROWS = ROOT / "docs" / "explanation" / "stranger.jsonl"
NOBODY = 65534
"""the user and group of an attempt without privileges"""
BUSY = 8
"""processes that compute all the time beside an attempt"""
LIMIT = 60 * 60
"""seconds for both commands"""
DEMO, TEST = "make demo", "make test"
ORDER = "--randomly-dont-reset-seed"
"""pytest-randomly changes the order, not the seeds"""
WITHOUT = ("ccache", "git", "node", "nodejs", "npm")
"""programs that an attempt without privileges does not have"""


@dataclass(frozen=True)
class Kind:
    """The circumstances of attempts, and how many make the table complete."""

    name: str
    count: int
    title: str


KINDS = (
    Kind("idle", 5, "nothing else runs"),
    Kind("busy", 4, f"beside {BUSY} busy processes"),
    Kind("one-cpu", 4, "on one CPU"),
    Kind("user", 3, "no root, no git, ccache or node; from an archive"),
    Kind("order", 2, "files and tests in a random order"),
    Kind("python", 1, "another Python"),
    Kind("folder", 1, "in a folder named `a ä`"),
)


@dataclass
class Row:
    """An attempt: the outcome and the cost of each command."""

    kind: str
    commit: str
    date: str
    """UTC, to the minute"""
    python: str
    cpus: int
    demo_seconds: float = 0.0
    demo_cpu_seconds: float = 0.0
    test_seconds: float = 0.0
    test_cpu_seconds: float = 0.0
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    status: int = 0
    """of the command that failed, else 0"""
    failures: tuple[str, ...] = ()

    @property
    def is_green(self) -> bool:
        return self.status == 0 and self.passed > 0 and self.skipped == 0


def attempt(kind: Kind, newest: str) -> Row:
    """Run both commands in a new clone. Their output goes to a file that it names. `newest` is the
    interpreter of the kind `python`."""
    place = Path(tempfile.mkdtemp(prefix="stranger-", dir="/var/tmp"))
    try:
        home, clone = place / "home", place / ("a ä" if kind.name == "folder" else "clone")
        home.mkdir()
        _copy(clone, archive=kind.name == "user")
        python = newest if kind.name == "python" else "/usr/bin/python3"
        environment = _environment(home, place, kind)
        prefix = {
            "one-cpu": ["taskset", "-c", "0"],
            "user": ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"],
        }.get(kind.name, [])
        if kind.name == "user":
            subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(place)], check=True)
        row = Row(kind.name, _commit(), _now(), _version(python), os.cpu_count() or 0)
        log = Path(tempfile.gettempdir()) / f"stranger-{kind.name}-{os.getpid()}.txt"
        print(f"{kind.name}: {kind.title}; the output goes to {log}", flush=True)
        with log.open("w") as output, _neighbours(BUSY if kind.name == "busy" else 0):
            end = time.monotonic() + LIMIT

            def make(*words: str, **variables: str) -> tuple[int, float, float]:
                """Exit status, seconds and CPU seconds of a command in the clone."""
                begin, cpu = time.monotonic(), _cpu_of_children()
                try:
                    status = subprocess.run(
                        [*prefix, *words], cwd=clone, env=environment | variables, check=False,
                        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                        timeout=end - begin,
                    ).returncode  # fmt: skip
                except subprocess.TimeoutExpired:
                    status = 124
                return status, time.monotonic() - begin, _cpu_of_children() - cpu

            row.status, row.demo_seconds, row.demo_cpu_seconds = make(
                *DEMO.split(), f"PYTHON={python}"
            )
            if row.status == 0:
                options = {}
                if kind.name == "order":
                    make(".venv/bin/python", "-m", "pip", "install", "-q", "pytest-randomly")
                    options["PYTEST_ADDOPTS"] = ORDER
                row.status, row.test_seconds, row.test_cpu_seconds = make(
                    *TEST.split(), f"PYTHON={python}", **options
                )
        text = log.read_text(errors="replace")
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", _summary(text))}
        row.passed, row.skipped = counts.get("passed", 0), counts.get("skipped", 0)
        row.failed = counts.get("failed", 0) + counts.get("errors", 0) + counts.get("error", 0)
        row.failures = tuple(sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M))))
        return row
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _copy(clone: Path, *, archive: bool) -> None:
    """The committed files: a clone, or what an archive of them holds."""
    if not archive:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        return
    clone.mkdir()
    with subprocess.Popen(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE) as files:
        subprocess.run(["tar", "x", "-C", str(clone)], stdin=files.stdout, check=True)


def _environment(home: Path, place: Path, kind: Kind) -> dict[str, str]:
    """What a login shell has, and the settings with which this machine's pip finds its index."""
    path = "/usr/local/bin:/usr/bin:/bin"
    if kind.name == "user":
        path = str(_programs_but(WITHOUT, place / "bin"))
    variables = pip_settings()
    if (settings := variables.pop("PIP_CONFIG_FILE", None)) is not None:
        (home / ".config" / "pip").mkdir(parents=True)
        shutil.copyfile(settings, home / ".config" / "pip" / "pip.conf")
    return {**variables, "HOME": str(home), "PATH": path, "LANG": "C.UTF-8"}


def _programs_but(names: Sequence[str], folder: Path) -> Path:
    """A folder with links to the system's programs, except for these."""
    folder.mkdir()
    for program in (*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()):
        link = folder / program.name
        if program.name not in names and not link.is_symlink():
            link.symlink_to(program)
    return folder


def _version(python: str) -> str:
    printed = subprocess.check_output([python, "--version"], text=True)
    return printed.split()[1]


def _commit() -> str:
    words = ["git", "rev-parse", "--short=12", "HEAD"]
    return subprocess.check_output(words, cwd=ROOT, text=True).strip()


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")


def _summary(text: str) -> str:
    """pytest's last line of counts."""
    lines = re.findall(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", text, re.M)
    return lines[-1] if lines else ""


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def _neighbours(count: int) -> Iterator[None]:
    """Processes that compute until the end of the block."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def read_rows() -> list[Row]:
    """The attempts so far, in order."""
    if not ROWS.exists():
        return []
    lines = ROWS.read_text(encoding="utf-8").splitlines()
    return [Row(**{**json.loads(line), "failures": ()}) for line in lines]


def table(rows: Sequence[Row]) -> str:
    """A table in Markdown with a line for each attempt."""
    titles = {kind.name: kind.title for kind in KINDS}
    lines = [
        "| circumstances | commit | Python | `make demo` | CPU | `make test` | CPU | tests |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        outcome = f"{row.passed:,} passed" if row.is_green else f"**red**: {row.failed} failed"
        cells = (
            titles[row.kind], f"`{row.commit[:8]}`", row.python, _minutes(row.demo_seconds),
            _minutes(row.demo_cpu_seconds), _minutes(row.test_seconds),
            _minutes(row.test_cpu_seconds), outcome,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [kind.name for kind in KINDS]
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(names))
    parser.add_argument("--python", help="the interpreter for the kind `python`")
    parser.add_argument("--table", action="store_true", help="print the table of all attempts")
    options = parser.parse_args()
    if options.table:
        print(table(read_rows()))
        return 0
    for name in options.kinds:
        if name not in names:
            parser.error(f"no kind {name!r}; there are {', '.join(names)}")
    done = Counter(row.kind for row in read_rows() if row.commit == _commit() and row.is_green)
    wanted = [
        kind for kind in KINDS if kind.name in (options.kinds or names)
        for _ in range(kind.count - done[kind.name])
    ]  # fmt: skip
    if not options.python and any(kind.name == "python" for kind in wanted):
        parser.error("the kind `python` needs --python INTERPRETER, the newest at hand")
    red = 0
    for number, kind in enumerate(wanted, 1):
        row = attempt(kind, options.python)
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        red += not row.is_green
        print(f"{number} of {len(wanted)}: {'green' if row.is_green else 'RED'} {row}", flush=True)
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
