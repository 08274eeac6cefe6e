"""The repetitions that llama-bench and `instr bench` made: tokens per second as llama-bench prints
them, where their time went, and configurations that took turns.

Invariant: a repetition lasts as long as its program measured, and its parts add up to that. Warm-up
and tokens that only fill the context do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses import noise
from llamacpp_instr.converters.analyses.clock import Machine, compute_machine, machine_notes
from llamacpp_instr.converters.analyses.step_times import median_of_sessions
from llamacpp_instr.converters.analyses.tables import grouped, header
from llamacpp_instr.log.schema import Model
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import BESIDE, Account, counted_steps
from llamacpp_instr.report.report import Cell, Column, Figures, Report, Unit, columns_of, shown

Int64 = NDArray[np.int64]

OURS = "instr bench"
PROGRAMS = ("llama-bench", OURS)
"""the names of their notes"""


class Repetition(msgspec.Struct, frozen=True):
    """What a program notes at the end of a repetition."""

    test: int
    """counts the tests of a log from 1"""
    n_prompt: int
    n_gen: int
    n_depth: int
    """tokens that the context already has"""
    n_threads: int
    ns: int
    backend: str = ""
    """empty if the program did not note it"""
    # llama-bench prints those of these that differ from its own defaults
    n_batch: int = 2048
    n_ubatch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: int = -1

    @property
    def name(self) -> str:
        """The name of the test, as llama-bench prints it: `pp512`, `tg128 @ d4096`."""
        parts = [f"{what}{n}" for what, n in (("pp", self.n_prompt), ("tg", self.n_gen)) if n > 0]
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth > 0 else "")

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen

    @property
    def rate(self) -> float:
        """Tokens per second (`test::get_ts` of tools/llama-bench/llama-bench.cpp)."""
        return 1e9 * self.n_tokens / max(self.ns, 1)


SETTINGS = {
    of.name: of.default
    for of in msgspec.structs.fields(Repetition)
    if not of.required and of.name != "backend"
}
"""with the values that llama-bench does not print"""


def find_repetitions(session: Session) -> tuple[list[Repetition], Int64]:
    """The repetitions that programs noted, in order, and when each had ended, ns, (n,)."""
    found, ends = [], []
    for note in session.notes:
        if note.name in PROGRAMS:
            with suppress(msgspec.ValidationError):  # another application's
                found.append(msgspec.convert(note.data, Repetition))
                ends.append(note.t)
    return found, np.array(ends, np.int64)


@dataclass(frozen=True)
class Test:
    """The repetitions of one test of a log."""

    repetitions: Sequence[Repetition]
    model: Model | None
    backends: Sequence[str]
    """of its context"""
    rows: Int64
    """of its steps, among those that count"""


def find_tests(account: Account) -> list[Test]:
    """The tests of a session, in the order in which they began; none if no such program ran."""
    session, steps = account.session, account.steps
    repetitions, ends = find_repetitions(session)
    # what lies between repetitions does not count, so a step that counts belongs to the next one
    of_step = np.searchsorted(ends, steps["end"])
    tests = []
    for numbers in grouped(range(len(ends)), lambda i: repetitions[i].test).values():
        rows = np.flatnonzero(np.isin(of_step, numbers))
        context = next((session.contexts[of] for of in steps["ctx"][rows[:1]].tolist()), None)
        model = session.models.get(context.model) if context else None
        backends = context.backends if context else []
        tests.append(Test([repetitions[i] for i in numbers], model, backends, rows))
    return tests


def bench_reports(account: Account) -> list[Report]:
    """The table that llama-bench prints, and where the time of each test went; no reports for a
    session without tests."""
    tests = find_tests(account)
    if not tests:
        return []
    names, others = _settings(tests)
    return [_speeds(tests, names, others), _times(account, tests, names)]


Settings = dict[Column, list[Cell]]
"""columns, with a cell for each test"""


def _settings(tests: Sequence[Test]) -> tuple[Settings, Settings]:
    """The columns of llama-bench's table before its last: those that tell a test from the others,
    and the rest."""
    firsts, models = [test.repetitions[0] for test in tests], [test.model for test in tests]
    found: Settings = {
        Column("model"): [of.description if of else None for of in models],
        Column("size"): [_size(of.bytes) if of else None for of in models],
        Column("params"): [_parameters(of.params) if of else None for of in models],
        Column("backend"): [_backend(test) for test in tests],
        Column("threads", "id"): [of.n_threads for of in firsts],
    }
    for name, default in SETTINGS.items():
        cells = [getattr(of, name) for of in firsts]
        if {*cells} != {default}:
            found[Column(name, "id" if isinstance(default, int) else "text")] = cells
    names: Settings = {Column("test"): [of.name for of in firsts]}
    names |= {column: cells for column, cells in found.items() if len({*cells}) > 1}
    return names, {column: cells for column, cells in found.items() if column not in names}


def _backend(test: Test) -> str:
    """As llama-bench prints it: the CPU only if it is alone."""
    others = [name for name in test.backends if name != "CPU"]
    return test.repetitions[0].backend or ",".join(others) or "CPU"


def _size(n_bytes: int) -> str:
    """As llama-bench prints it."""
    gib = n_bytes / 1024**3
    return f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.2f} MiB"


def _parameters(n: int) -> str:
    """As llama-bench prints them."""
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


RATE = header(Column("t/s", "rate", "tokens_per_s"), Column("±", "rate", "deviation"))


def _rate(repetitions: Sequence[Repetition]) -> list[Cell]:
    """The mean and the standard deviation of their rates, as llama-bench has them."""
    rates = [of.rate for of in repetitions]
    return [float(np.mean(rates)), float(np.std(rates, ddof=1)) if len(rates) > 1 else 0.0]


def _speeds(tests: Sequence[Test], names: Settings, others: Settings) -> Report:
    rows: list[list[Cell]] = []
    for i, test in enumerate(tests):
        rates = [of.rate for of in test.repetitions]
        row = [cells[i] for cells in names.values()]
        row += [*_rate(test.repetitions), min(rates), max(rates), len(rates)]
        rows.append([*row, *(cells[i] for cells in others.values())])
    figures: Figures = {}
    for model in {test.model.model: test.model for test in tests if test.model}.values():
        figures[f"bytes of {model.description}"] = (model.bytes, "bytes")
        figures[f"parameters of {model.description}"] = (model.params, "count")
    spread = header(("rate", "lowest", "highest"), ("count", "repetitions"))
    columns = [*names, *RATE, *spread, *others]
    notes = [
        "t/s is the mean of the repetitions by the clock of the program, ± their standard deviation"
        " as in llama-bench."
    ]
    return Report("Benchmark", columns, rows, notes, figures=figures, labels=len(names))


def _times(account: Account, tests: Sequence[Test], names: Settings) -> Report:
    """Every nanosecond of a repetition, by test."""
    (inside, _), *_ = account.parts.items()
    beside = [what for what in BESIDE if account.parts.get(what, np.zeros(0)).any()]
    rows: list[list[Cell]] = []
    for i, test in enumerate(tests):
        n = len(test.repetitions)
        total = sum(of.ns for of in test.repetitions) / n
        spent = {what: int(ns[test.rows].sum()) / n for what, ns in account.parts.items()}
        row = [cells[i] for cells in names.values()]
        row += [total, spent[inside], spent[inside] / max(total, 1)]
        rows.append([*row, *(spent[what] for what in beside), total - sum(spent.values())])
    columns = [
        *names, *columns_of("ns", "repetition", inside), Column("of it", "share"),
        *columns_of("ns", *beside, "the program"),
    ]  # fmt: skip
    notes = [
        "Means of the repetitions; the parts add up to a whole one. The program's part is the time"
        " between llama.cpp's steps."
    ]
    title = "Where the time of a repetition went"
    return Report(title, columns, rows, notes, labels=len(names), key="bench_times")


# --- interleaved configurations ---

Configurations = Sequence[tuple[str, Sequence[Session]]]
"""the name of the model, and the session of each round"""
Fact = tuple[Cell, Unit]


def compare_configurations(
    configurations: Configurations, machine: Mapping[str, Fact], every_round: bool = False
) -> list[Report]:
    """The speed of each test of each configuration, also against the first one, whose tests are
    the same; and what the machine did, with the further facts in `machine`. With `every_round`
    also each repetition."""
    found: list[tuple[str, list[Repetition]]] = []
    for name, sessions in configurations:
        every = [of for session in sessions for of in find_repetitions(session)[0]]
        found += [(name, of) for of in grouped(every, lambda of: (of.n_prompt, of.n_gen)).values()]
    notes = machine_notes([(_name(of), _machines(of[1])) for of in configurations])
    reports = [compare_speeds(found, notes), _machine_report(configurations, machine)]
    if every_round:
        each: list[list[Cell]] = [
            [name, of.n_threads, of.name, number, of.ns, of.rate, session.path]
            for name, sessions in configurations
            for number, session in enumerate(sessions, 1)
            for of in find_repetitions(session)[0]
        ]
        names = header("model", ("id", "threads"), "test", ("id", "round"))
        columns = [*names, Column("time", "ns"), RATE[0], Column("log")]
        reports.append(Report("Rounds", columns, each, labels=4))
    return reports


def compare_speeds(
    found: Sequence[tuple[str, Sequence[Repetition]]], notes: Sequence[str] = ()
) -> Report:
    """The speed of each configuration, by name, in the repetitions of one of its tests, one for
    each round, also against the first one."""
    first: dict[tuple[int, int], Sequence[Repetition]] = {}
    for _, own in found:
        first.setdefault((own[0].n_prompt, own[0].n_gen), own)
    rows: list[list[Cell]] = []
    for name, own in found:
        base = first[own[0].n_prompt, own[0].n_gen]
        row = [name, own[0].n_threads, own[0].name, *_rate(own), *_interval(own, len(found))]
        rows.append([*row, *_against(base, own, len(found) - len(first))])
    columns = header(
        "model", ("id", "threads"), "test", *RATE, Column("t/s from", "rate", "tokens_per_s_from"),
        Column("t/s to", "rate", "tokens_per_s_to"), Column("× first", "ratio", "ratio"),
        ("ratio", "from", "to"), "verdict",
    )  # fmt: skip
    n = max(len(own) for _, own in found)
    notes = [
        "t/s is the mean of the rounds, ± their standard deviation. × first is the speed relative"
        " to the first configuration, paired by round. The 95 % intervals, from and to, hold for"
        " the whole table at once.",
        *notes,
    ]
    if n < noise.MIN_BLOCKS:
        notes.append(f"Fewer than {noise.MIN_BLOCKS} rounds do not show the noise.")
    title = f"Tokens per second, {counted(n, 'interleaved round')}"
    return Report(title, columns, rows, notes, labels=3, key="bench")


def _interval(own: Sequence[Repetition], n_family: int) -> list[Cell]:
    """The interval of the tokens per second; None if the rounds do not show the noise."""
    times = noise.interval(median_of_sessions([float(of.ns) for of in own]), n_family)
    return [1e9 * own[0].n_tokens / ns for ns in reversed(times)] if times else [None, None]


def _against(base: Sequence[Repetition], own: Sequence[Repetition], n_family: int) -> list[Cell]:
    """The speed against the first configuration's, its interval, and the verdict; empty cells for
    that configuration itself."""
    if own is base:
        return [None] * 4
    rounds = [(float(a.ns), float(b.ns)) for a, b in zip(base, own, strict=False)]
    a, b = (median_of_sessions(times) for times in zip(*rounds, strict=True))
    ratio = noise.compare(a, b, n_family, in_turns=True)
    times = ratio.value, ratio.high, ratio.low
    return [*(1 / of if of else None for of in times), ratio.verdict]


def _name(configuration: tuple[str, Sequence[Session]]) -> str:
    """A configuration as a sentence names it: `Q4_K_M, 2 threads, depth 4096`."""
    model, sessions = configuration
    first, *_ = (of for session in sessions for of in find_repetitions(session)[0])
    depth = f", depth {first.n_depth}" if first.n_depth else ""
    return f"{model}, {counted(first.n_threads, 'thread')}{depth}"


def _machines(sessions: Sequence[Session]) -> list[Machine | None]:
    return [compute_machine(session, counted_steps(session)[0]) for session in sessions]


def _machine_report(configurations: Configurations, known: Mapping[str, Fact]) -> Report:
    """The machine, and what it did besides the rounds."""
    sessions = [session for _, of in configurations for session in of]
    host = sessions[0].start.host
    facts: Figures = {"CPU": (host.cpu, "text"), "processors": (host.cores, "count"), **known}
    machines = [of for of in _machines(sessions) if of is not None]
    if machines:
        of_all = Machine.together(machines)
        facts["largest load"] = (of_all.load, "number")
        facts["CPU time lost to others"] = (of_all.share, "fraction")
    counts = [row for of in sessions for row in of.machine.tuples("busy", "cpu", "dur")]
    counts = [row for row in counts if row[0] is not None]
    if counts:
        busy, cpu, dur = map(sum, zip(*counts, strict=True))
        used = max(busy - cpu, 0) / max(dur * host.cores, 1)
        facts["used by other processes"] = (used, "fraction")
    rows: list[list[Cell]] = [[what, shown(*of)] for what, of in facts.items() if of[0] is not None]
    figures = {what: of for what, of in facts.items() if of[1] != "text"}
    return Report("Machine", header("fact", "value"), rows, headed=False, figures=figures)
