"""The engines of a machine that may not exist: kinds of them, from `--engines 4` or a TOML file.

Invariant: an `Engines` has at least one engine, names are unique, and every number is in its range,
so no later step has to check them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import printable
from llamacpp_instr.converters.scheduling.tasks import KINDS, Label, Tasks

MAX_ENGINES = 4096
MAX_HANDOVER_NS = 10**12
MAX_MEMORY = 2**60
_SPEEDS = (1e-6, 1e6)
_BANDWIDTHS = (1e3, 1e18)


class EngineKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engines that are all alike."""

    name: str
    count: int = 1
    runs: frozenset[str] | None = None
    """ops and kinds of tasks, such as MUL_MAT and matrix; None: everything"""
    speed: dict[str, float] = {}
    """times as fast as the recording, by op, by kind, or for all others by `*`; else 1"""
    bandwidth: float | None = None
    """bytes per second of one engine: a task takes at least bytes / bandwidth"""
    local_memory: int | None = None
    """bytes: two buffers of half of it hold what transfers bring"""

    @property
    def transfers(self) -> bool:
        """Whether it is a DMA engine: dedicated to tasks that only move data."""
        return self.runs == frozenset({"memory"})

    def can_run(self, label: Label) -> bool:
        """Whether tasks of this label can run here."""
        return self.runs is None or label.op in self.runs or label.kind in self.runs

    def speed_of(self, label: Label) -> float:
        """Times as fast as the recording: of the op, else of the kind, else of `*`, else 1."""
        return next(
            (self.speed[key] for key in (label.op, label.kind, "*") if key in self.speed), 1.0
        )


@dataclass(frozen=True)
class Engines:
    """Engines are numbered over the kinds, in their order."""

    kinds: tuple[EngineKind, ...]
    handover_ns: int = 0
    """a task begins at least this long after the end of a source that ran on another engine"""
    transfers: bool = False
    """DMA engines bring loads to the engines that have local memory"""

    def count(self) -> int:
        """How many engines there are."""
        return sum(kind.count for kind in self.kinds)

    def name(self, engine: int) -> str:
        """The kind's name and the number among its kind: `matrix 0`."""
        for kind in self.kinds:
            if engine < kind.count:
                return f"{kind.name} {engine}"
            engine -= kind.count
        raise IndexError(engine)

    def kind_numbers(self) -> list[int]:
        """For each engine, the number of its kind."""
        return [number for number, kind in enumerate(self.kinds) for _ in range(kind.count)]


def equal_engines(n: int) -> Engines:
    """`n` engines as fast as the recording's, which run everything. Raises UsageError."""
    if not 1 <= n <= MAX_ENGINES:
        raise UsageError(f"engines: expected 1 to {MAX_ENGINES}, got {n}")
    return Engines((EngineKind("engine", n),))


def parse_engines(text: str) -> Engines:
    """What `--engines` takes: a number of equal engines, or the path of a TOML file.

    Raises UsageError.
    """
    if text.isdecimal():
        return equal_engines(int(text) if len(text) < 10 else 10**9)
    if not text or not Path(text).exists():
        raise UsageError(
            f"engines: expected a number or a TOML file, and there is no file {printable(text)!r}"
        )
    return read_engines(text)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    engine: list[EngineKind] = []
    handover_ns: int = 0
    transfers: bool = False


def read_engines(path: str | Path) -> Engines:
    """The engines of a TOML file. Raises UsageError, which names the file and the wrong key."""
    return _checked(str(path), read_toml(path, _File))


def read_toml(path: str | Path, kind: type[Any]) -> Any:
    """A TOML file as that msgspec.Struct. Raises UsageError, which names the file and the key."""
    try:
        return msgspec.toml.decode(Path(path).read_bytes(), type=kind)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: {printable(str(error))}") from None


def check_usable(tasks: Tasks, engines: Engines) -> None:
    """Raises UsageError for an engine that no task can use, and for a task that no engine runs."""
    used = set(tasks.label.tolist())
    labels = [tasks.labels[i] for i in sorted(used)]
    for kind in engines.kinds:
        brings = engines.transfers and kind.transfers and bool((tasks.load > 0).any())
        if not brings and not any(map(kind.can_run, labels)):
            runs = ", ".join(sorted(kind.runs or ()))
            raise UsageError(
                f"engine {kind.name}: it runs {runs}, but no task is of that;"
                f" the tasks are {_ops(labels)}"
            )
    for label in labels:
        if not any(kind.can_run(label) for kind in engines.kinds):
            raise UsageError(
                f"no engine runs {label.op} ({label.kind}), such as {printable(label.name)};"
                f' add "{label.op}" or "{label.kind}" to what one of them runs'
            )


def _ops(labels: Iterable[Label]) -> str:
    found = sorted({f"{label.op} ({label.kind})" for label in labels})
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return printable(", ".join(found[:8])) + more


def _checked(path: str, file: _File) -> Engines:
    if not file.engine:
        raise UsageError(f"{path}: no engines; add an [[engine]] with a name")
    if not 0 <= file.handover_ns <= MAX_HANDOVER_NS:
        raise UsageError(
            f"{path}: handover_ns must be 0 to {MAX_HANDOVER_NS}, got {file.handover_ns}"
        )
    kinds: dict[str, EngineKind] = {}
    for given in file.engine:
        where = f"{path}: engine {printable(given.name)}"
        if not given.name.strip():
            raise UsageError(f"{path}: an engine's name is empty")
        if given.name in kinds:
            raise UsageError(f"{where} is there twice; use count for engines that are alike")
        _check_kind(where, given)
        kinds[given.name] = given
    engines = Engines(tuple(kinds.values()), file.handover_ns, file.transfers)
    if engines.count() > MAX_ENGINES:
        raise UsageError(f"{path}: {engines.count()} engines; at most {MAX_ENGINES} are possible")
    _check_transfers(path, engines)
    return engines


def _check_kind(where: str, given: EngineKind) -> None:
    if given.count < 1:
        raise UsageError(f"{where}: count must be at least 1, got {given.count}")
    if given.runs is not None and not given.runs:
        raise UsageError(f"{where}: runs is empty; leave it out for an engine that runs everything")
    for key in [*sorted(given.runs or ()), *(key for key in given.speed if key != "*")]:
        if key not in KINDS and (not key or key != key.upper()):
            raise UsageError(
                f"{where}: {printable(key)!r} is neither a kind ({', '.join(KINDS)})"
                " nor an op such as MUL_MAT"
            )
    for key, speed in given.speed.items():
        _check_range(f"{where}: speed of {printable(key)}", speed, _SPEEDS)
    if given.bandwidth is not None:
        _check_range(f"{where}: bandwidth, in bytes per second,", given.bandwidth, _BANDWIDTHS)
    if given.local_memory is not None and not 2 <= given.local_memory <= MAX_MEMORY:
        raise UsageError(
            f"{where}: local_memory must be 2 to {MAX_MEMORY} bytes, got {given.local_memory}"
        )


def _check_range(what: str, value: float, bounds: tuple[float, float]) -> None:
    low, high = bounds
    if math.isnan(value) or not low <= value <= high:
        raise UsageError(f"{what} must be {low:g} to {high:g}, got {value:g}")


def _check_transfers(path: str, engines: Engines) -> None:
    fed = [kind.name for kind in engines.kinds if kind.local_memory is not None]
    if not engines.transfers:
        if fed:
            raise UsageError(
                f"{path}: engine {printable(fed[0])} has local_memory; add transfers = true"
                " so that loads are brought into it"
            )
        return
    if not fed:
        raise UsageError(f"{path}: transfers = true, but no engine has local_memory")
    bring = [kind for kind in engines.kinds if kind.transfers]
    if not bring:
        raise UsageError(f'{path}: transfers = true, but no engine has runs = ["memory"]')
    for kind in bring:
        if kind.bandwidth is None:
            raise UsageError(
                f"{path}: engine {printable(kind.name)} brings loads, so it needs a bandwidth"
            )
        if kind.local_memory is not None:
            raise UsageError(
                f"{path}: engine {printable(kind.name)} brings loads; it has no local_memory"
            )
