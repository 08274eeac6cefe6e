"""The tables whose rows are single events: computes, messages, notes, values, the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from llamacpp_instr.converters.exports.names import host_of, id_of, name_of
from llamacpp_instr.converters.exports.tables.cells import Int64, int64, optional, text
from llamacpp_instr.log.session import Session

Category = Callable[[str, Iterable[str | None]], Any]
"""a column of words, by its name"""
Phases = Callable[[Int64], Any]
"""the phases of steps"""


def compute_columns(session: Session, category: Category, phases: Phases) -> dict[str, Any]:
    computes = session.computes
    numbers = ("n_tokens", "n_threads", "t", "apply", "build", "alloc", "inputs")
    return {
        **{name: computes[name] for name in ("compute", "graph", "ctx", "step")},
        "phase": phases(computes["step"]),
        "source": category("source", computes["source"]),
        "reused": computes["reused"],
        **{name: computes[name] for name in numbers},
        "begin": computes["t"] + computes["start"],
        "dur": computes["dur"],
        "status": computes["status"],
    }


def machine_columns(session: Session) -> dict[str, Any]:
    machine = session.machine
    return {
        "begin": machine["t"] - machine["dur"],
        "end": machine["t"],
        **{name: machine[name] for name in ("dur", "cpu")},
        "delay": optional(machine["delay"]),
        **{name: machine[name] for name in ("nvcsw", "nivcsw")},
        "load": machine["load"].astype(np.float64),  # None becomes NaN
        **{name: optional(machine[name]) for name in ("running", "steal")},
    }


def message_columns(session: Session, category: Category) -> dict[str, Any]:
    messages = session.messages
    return {
        "t": int64([event.t for event in messages]),
        "level": category("level", [event.level for event in messages]),
        "text": text([event.text for event in messages]),
    }


def note_columns(session: Session, category: Category) -> dict[str, Any]:
    data = [msgspec.json.encode(event.data).decode("utf-8", "replace") for event in session.notes]
    return {
        "t": int64([event.t for event in session.notes]),
        "name": category("name", [event.name for event in session.notes]),
        "data": text(data),
    }


def statistics_columns(
    session: Session, category: Category, phases: Phases, step_of: dict[int, int]
) -> dict[str, Any]:
    stats = session.stats
    step = int64([step_of.get(event.compute, -1) for event in stats])
    floats = {
        name: np.array([getattr(event, name) for event in stats], np.float64)  # None becomes NaN
        for name in ("min", "max", "mean", "std")
    }
    return {
        "t": int64([event.t for event in stats]),
        "compute": int64([event.compute for event in stats]),
        "step": step,
        "phase": phases(step),
        "graph": int64([event.graph for event in stats]),
        "node": int64([event.node for event in stats]),
        "name": category("name", [event.name for event in stats]),
        "layer": int64([event.layer for event in stats]),
        "n": int64([event.n for event in stats]),
        **floats,
        **{
            name: int64([getattr(event, name) for event in stats])
            for name in ("nan", "inf", "zero")
        },
        "hist": text([",".join(map(str, event.hist)) for event in stats]),
    }


def session_columns(session: Session) -> dict[str, Any]:
    start = session.start
    words = {
        "id": id_of(start, session.path),
        "host": host_of(start),
        "models": ", ".join(sorted({name_of(model) for model in session.models.values()})) or None,
        "cpu": start.host.cpu,
        "os": start.host.os,
        "level": start.level,
        "build": start.producer.llama_cpp,
        "llama_cpp": start.producer.commit,
    }
    return {
        **{name: text([word]) for name, word in words.items()},
        "cores": int64([start.host.cores]),
        "memory": int64([start.host.memory]),
        "perturbed": [start.perturbed],
        "wall": pd.to_datetime([start.wall], unit="ns", utc=True),
        "begin": int64([start.t]),
    }
