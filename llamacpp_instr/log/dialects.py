"""Converts the two flat dialects of an earlier fork to events of the schema while reading.

    flat-event   the key `event` names the event; durations are `metrics.execution_time_us`
    flat-type    the key `type` names the event and also the type of a tensor: `tensor_log` lines
                 have the key twice; durations are `duration_ms`

Invariant: nothing is invented and nothing is lost. An outermost step becomes a step. A step inside
it (a layer) becomes a mark. What the schema cannot express is kept unchanged in a note. All
timestamps of a log may be equal, so only durations are reliable: each step begins where the
previous one ends, or later if its timestamp says so.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar

import msgspec

from llamacpp_instr.log import schema

Name = Literal["flat-event", "flat-type"]
MAX_LINE = 1 << 20
"""in bytes; lines of the fork have some hundreds, and all objects of a line are decoded"""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NAME_KEYS: dict[str, Name] = {"event": "flat-event", "type": "flat-type"}


def dialect_of(first: dict[str, Any]) -> Dialect | None:
    """The dialect whose first line decodes to `first`, or None."""
    for key, name in _NAME_KEYS.items():
        if first.get(key) == "session_start" and isinstance(first.get("timestamp"), str):
            return Dialect(name, key)
    return None


class _Step(NamedTuple):
    name: str
    begin: int
    mark: int
    """-1 for an outermost step, which becomes a step of the schema, not a mark"""


@dataclass
class Dialect:
    """The conversion of one log. Pass every line in order."""

    name: Name
    key: str
    """names the event"""
    _start: int | None = None
    """the first timestamp, as nanoseconds since 1970"""
    _now: int = 0
    """the earliest start of the next step"""
    _open: list[_Step] = field(default_factory=list)
    _steps: int = 0
    _marks: int = 0

    @property
    def closed(self) -> bool:
        """Whether every step has ended: no line marks the end of a session."""
        return not self._open

    def convert(self, line: bytes) -> list[schema.Event]:
        """The events of `line`. Raises ValueError if it belongs to no dialect."""
        if len(line) > MAX_LINE:
            raise ValueError(f"longer than {MAX_LINE >> 20} MiB")
        if _SURROGATE.search(line):
            msgspec.json.decode(line)  # refuses halves of a character, which cannot be written
        data = json.loads(line, object_pairs_hook=self._object)
        if not isinstance(data, dict):
            raise ValueError("not an object")
        what = data.pop(self.key, None)
        if not isinstance(what, str):
            raise ValueError(f"no key `{self.key}`")
        stamp = _nanoseconds(data.pop("timestamp", None))
        if self._start is None:
            if what != "session_start":
                raise ValueError("the log does not begin with session_start")
            self._start = stamp
        elif what != "step_end":
            # a step ends after its duration, whenever its line was written
            self._advance(stamp - self._start)
        if what == "session_start":
            return self._session_start(data, stamp)
        data.pop("session_id", None)
        if what == "step_begin":
            return self._step_begin(data)
        if what == "step_end":
            return self._step_end(data, stamp)
        return [schema.Note(t=self._now, name=what, data=data)]

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """The second `type` is that of a tensor."""
        found: dict[str, Any] = {}
        for key, value in pairs:
            found["tensor_type" if key == self.key and key in found else key] = value
        return found

    def _advance(self, t: int) -> None:
        if t > schema.LATEST:
            raise ValueError("146 years after the start of the log")
        self._now = max(self._now, t)

    def _session_start(self, data: dict[str, Any], stamp: int) -> list[schema.Event]:
        time = datetime.fromtimestamp(stamp / 1e9, timezone.utc)
        start = _event(
            schema.SessionStart,
            schema=schema.SCHEMA_VERSION,
            id=str(data.pop("session_id", "")),
            time=time.isoformat().replace("+00:00", "Z"),
            wall=stamp,
            level="minimal",
            clock="monotonic",
            args={"dialect": self.name, **data},
        )
        arch = data.get("model_arch")
        hparams = {k: v for k, v in data.items() if _is_number(v)}
        model = _event(schema.Model, arch=arch if isinstance(arch, str) else "", hparams=hparams)
        return [start, model, _event(schema.Context, causal=True)]

    def _step_begin(self, data: dict[str, Any]) -> list[schema.Event]:
        name = str(data.pop("step_name", "step"))
        events: list[schema.Event] = []
        if self._open:
            step = _Step(name, self._now, self._marks)
            self._marks += 1
            events.append(schema.Mark(t=self._now, mark=step.mark, name=name, phase="begin"))
        else:
            step = _Step(name, self._now, -1)
            data["step_name"] = name  # a step of the schema has no name
            events.append(
                _event(
                    schema.StepBegin,
                    t=self._now,
                    step=self._steps,
                    kind="decode",
                    phase="prefill" if "prefill" in name or "prompt" in name else "decode",
                )
            )
        self._open.append(step)
        if data:
            events.append(schema.Note(t=self._now, name="step_begin", data=data))
        return events

    def _step_end(self, data: dict[str, Any], stamp: int) -> list[schema.Event]:
        metrics = data.get("metrics")
        rest = {**data, **metrics} if isinstance(metrics, dict) else data
        if rest is not data:
            del rest["metrics"]
        name = str(rest.pop("step_name", self._open[-1].name if self._open else "step"))
        events: list[schema.Event] = []
        if all(step.name != name for step in self._open):
            events += self._step_begin({"step_name": name})
        while self._open:
            step = self._open.pop()
            duration = _duration(rest) if step.name == name else None
            if duration is None:
                self._advance(stamp - (self._start or 0))
            else:
                self._advance(step.begin + duration)
            if step.mark >= 0:
                end = schema.Mark(t=self._now, mark=step.mark, name=step.name, phase="end")
                events.append(end)
            else:
                events.append(_event(schema.StepEnd, t=self._now, step=self._steps))
                self._steps += 1
            if step.name == name:
                break
        if rest:
            data = {"step_name": name, **rest}
            events.append(schema.Note(t=self._now, name="step_end", data=data))
        return events


E = TypeVar("E", bound=msgspec.Struct)


def _event(of: type[E], /, **known: Any) -> E:
    """An event in which all other required keys are zero or empty."""
    return of(**_zeros(of) | known)


@cache
def _zeros(of: type[msgspec.Struct]) -> dict[str, Any]:
    keys = {key.name: key.type for key in msgspec.structs.fields(of) if key.required}
    plain = {name: getattr(kind, "__origin__", kind) for name, kind in keys.items()}
    return {
        name: kind(**_zeros(kind)) if hasattr(kind, "__struct_fields__") else kind()
        for name, kind in plain.items()
        if kind is not Literal
    }


def _duration(data: dict[str, Any]) -> int | None:
    """Removes a duration from `data` and returns it in nanoseconds."""
    for key, unit in (("execution_time_us", 1_000), ("duration_ms", 1_000_000)):
        number = data.get(key)
        if _is_number(number) and number * unit <= schema.MOST:
            del data[key]
            return max(0, round(number * unit))
    return None


def _nanoseconds(timestamp: object) -> int:
    """`2025-08-19 04:32:43.685` or `2024-01-15T10:30:00Z`, taken as UTC, since 1970."""
    if not isinstance(timestamp, str):
        raise ValueError("no timestamp")
    moment = datetime.fromisoformat(timestamp.replace("Z", "+00:00"))
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    since = moment - datetime(1970, 1, 1, tzinfo=timezone.utc)
    ns = (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
    if not 0 <= ns <= schema.LATEST:
        raise ValueError("a timestamp before 1970 or after 2116")
    return ns


def _is_number(value: object) -> TypeGuard[int | float]:
    # the bound excludes infinities and values that are not parameters of a model
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
