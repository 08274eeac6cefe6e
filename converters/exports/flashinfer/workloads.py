"""What the computes of sessions used: which definition, with which sizes, how often, how long; and
what is made from it: a data set, and a report about one.

Invariant: the time of a kernel counts once: for the use that has its nodes, or as an op without
definition. Times are those of thread 0, which takes part in every kernel.
"""

from __future__ import annotations

import json
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import OnProgress
from llamacpp_instr.converters.exports.flashinfer.definition import (
    Axes,
    Catalog,
    Definition,
    Use,
)
from llamacpp_instr.converters.exports.flashinfer.uses import (
    Case,
    Int32,
    case_of,
    kind_of,
    uses_of,
    views_of_log,
)
from llamacpp_instr.converters.exports.tensors import Tensors
from llamacpp_instr.log.graph.attention import Attention, Ubatch, attentions
from llamacpp_instr.log.graph.kernels import kernel_nodes, node_backends, without_copies
from llamacpp_instr.log.schema import Plan
from llamacpp_instr.log.session import Session, in_order
from llamacpp_instr.log.steps import Account, counted_steps
from llamacpp_instr.report.report import Cell, Column, Report, columns_of, shown

Arrays = Mapping[str, NDArray[Any]]
OUTPUT = "llama.cpp:"
"""before the name of an output among the tensors of a workload"""
NOT_FOUND = "definition not found"
_MOST = 1 << 24
"""rows or cells; a log with more is damaged"""
_NAMES = uuid.UUID("5f7e1c7a-52d1-4a0e-9c44-0d5f4f3f7a51")


@dataclass
class Workload:
    """A definition with sizes that occurred."""

    name: str
    """of the definition in the catalog"""
    axes: Axes
    integers: dict[str, Int32]
    scalars: dict[str, float]
    times: int = 0
    """how often it was computed"""
    ns: int = 0
    at_most: bool = False
    """whether the log does not record what a mask showed, so sizes are those of all cells"""
    stored: frozenset[str] = frozenset()
    """the tensors that were written: inputs by name, outputs behind `OUTPUT`"""

    @cached_property
    def id(self) -> str:
        """The same for the same sizes, in every export."""
        lists = {name: values.tolist() for name, values in self.integers.items()}
        content = json.dumps([self.name, self.axes, lists, self.scalars], sort_keys=True)
        return str(uuid.uuid5(_NAMES, content))


@dataclass
class Undescribed:
    """An op that no definition describes."""

    times: int = 0
    ns: int = 0


@dataclass
class Found:
    """All that the sessions used."""

    catalog: Catalog = field(default_factory=Catalog)
    workloads: dict[tuple[Any, ...], Workload] = field(default_factory=dict)
    undescribed: dict[str, Undescribed] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def workload(self, case: Case, at_most: bool = False) -> Workload:
        """The workload of a case: a new one if none has its sizes."""
        name = self.catalog.add(case.definition)
        integers = tuple((key, values.tobytes()) for key, values in case.integers.items())
        key = (name, *case.axes.items(), *integers, *case.scalars.items())
        if key not in self.workloads:
            self.workloads[key] = Workload(name, case.axes, case.integers, case.scalars)
        found = self.workloads[key]
        found.at_most |= at_most
        return found


@dataclass(frozen=True)
class _Kernels:
    """What each kernel of a plan is a part of."""

    uses: list[Use]
    kinds: list[Any]
    """by use: equal for those that are one workload in every compute"""
    attention: dict[int, Attention]
    """by use"""
    use: list[int]
    """by kernel: its number in `uses`, -1 for none"""
    op: list[str]


def find_workloads(sessions: Sequence[Session], on_progress: OnProgress) -> Found:
    """What all computes of the steps that count used. `on_progress` gets the lists of kernels done,
    and their total. Raises `UsageError` for a log without kernels."""
    found = Found()
    total = sum(len(ops) for session in sessions for ops in session.ops)
    done = 0
    for session in sessions:
        for _ in _of_session(found, session):
            done += 1
            on_progress(done, total)
    return found


def _of_session(found: Found, session: Session) -> Iterator[None]:
    """Yields after each compute."""
    steps, notes = counted_steps(session)
    found.notes += [f"{session.path}: {note}" for note in [*notes, *session.log_end.notes()]]
    account = Account(session, steps)
    kernels: dict[int, _Kernels] = {}
    cases: dict[tuple[int, Any, Ubatch | None], Workload] = {}
    graphs = {
        number: Tensors(without_copies(of)) for number, of in session.graphs.items() if of.nodes
    }
    if not account.ops:
        raise UsageError(f"{session.path}: no kernels; record with --level detailed")
    for ops, row in in_order(account.ops):
        plan = session.plans[ops.plan]
        g = graphs[plan.graph]
        if ops.plan not in kernels:
            kernels[ops.plan] = _kernels(g, plan)
        of, ubatch = kernels[ops.plan], session.ubatches.get(int(ops.compute[row]))
        spent: defaultdict[int, int] = defaultdict(int)
        for use, op, ns in zip(of.use, of.op, ops.dur[row].tolist(), strict=True):
            if use >= 0:
                spent[use] += ns
            else:
                undescribed = found.undescribed.setdefault(op, Undescribed())
                undescribed.times += 1
                undescribed.ns += ns
        # a plan may leave out the kernels of devices
        for number, ns in sorted(spent.items()):
            shape = of.attention.get(number)
            key = (ops.plan, of.kinds[number], ubatch if shape else None)
            if key not in cases:
                cases[key] = found.workload(*_case(g, of.uses[number], shape, ubatch))
            cases[key].times += 1
            cases[key].ns += ns
        yield


def _kernels(g: Tensors, plan: Plan) -> _Kernels:
    uses = uses_of(g)
    of_node = {node: number for number, use in enumerate(uses) for node in use.nodes}
    belongs, ops = [], []
    for nodes in kernel_nodes(g.graph, plan):
        belongs.append(next((of_node[node] for node in nodes if node in of_node), -1))
        ops.append("+".join(g.nodes.op[node] for node in nodes))
    shapes = attentions(g.graph, node_backends(g.graph))
    attention = {i: shapes[use.nodes[0]] for i, use in enumerate(uses) if use.attention}
    kinds = [(attention.get(i), *kind_of(g, use)) for i, use in enumerate(uses)]
    return _Kernels(uses, kinds, attention, belongs, ops)


def _case(
    g: Tensors, use: Use, attention: Attention | None, ubatch: Ubatch | None
) -> tuple[Case, bool]:
    if attention is None:
        if max(use.axes.values(), default=0) > _MOST:
            raise UsageError(f"graph {g.graph.graph}: impossible tensor sizes")
        return simple_case(use.definition, use), False
    if max(prod(g.ne(use.reads["q"])[1:]), prod(g.ne(use.reads["k"])[1:])) > _MOST:
        raise UsageError(f"graph {g.graph.graph}: impossible tensor sizes")
    views, known = views_of_log(attention, ubatch)
    return case_of(g, use, views), not known


def simple_case(definition: Definition, use: Use) -> Case:
    """A use whose sizes the graph determines, with integers that are valid: they count from 0, or
    are random below their bound."""
    integers = {}
    for name, below in use.indices.items():
        shape = definition.shape(name, use.axes)
        if below:
            integers[name] = np.random.default_rng(0).integers(0, below, shape, np.int32)
        else:
            integers[name] = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    return Case(definition, use.axes, integers, {})


# --- the data set ---


def write_tensors(found: Found, folder: Path, workload: Workload, arrays: Arrays) -> None:
    """Writes the tensors of a workload below `folder`."""
    from safetensors.numpy import save_file

    path = folder / _blob(found, workload)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(values) for name, values in arrays.items()}, path)
    workload.stored = frozenset(arrays)


def write_dataset(found: Found, folder: Path) -> None:
    """Writes a data set in the layout that `flashinfer_bench.TraceSet.from_path` reads below
    `folder`, which has nothing but captured tensors.

    definitions/OP_TYPE/NAME.json, workloads/OP_TYPE/NAME.jsonl, and the tensors of workloads in
    blob/workloads/OP_TYPE/NAME. `occurrences.json` is ours: how often each workload occurred.
    """
    by_name: dict[str, list[Workload]] = {}
    for workload in found.workloads.values():
        by_name.setdefault(workload.name, []).append(workload)
    for definition in found.catalog.values():
        place = Path(definition.op_type) / definition.name
        _write(folder / "definitions" / place.with_name(f"{place.name}.json"), definition.as_json())
        lines = []
        for workload in by_name[definition.name]:
            if workload.integers and not workload.stored:
                write_tensors(found, folder, workload, workload.integers)
            inputs: dict[str, Any] = {}
            for name in definition.inputs:
                if name in workload.scalars:
                    inputs[name] = {"type": "scalar", "value": workload.scalars[name]}
                elif name in workload.stored:
                    path = str(_blob(found, workload))
                    inputs[name] = {"type": "safetensors", "path": path, "tensor_key": name}
                else:
                    inputs[name] = {"type": "random"}
            whole = {"uuid": workload.id, "axes": workload.axes, "inputs": inputs}
            unsolved = {"solution": None, "evaluation": None}
            lines.append({"definition": definition.name, "workload": whole, **unsolved})
        file = folder / "workloads" / place.with_name(f"{place.name}.jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _write(folder / "occurrences.json", _occurrences(found))


def _blob(found: Found, workload: Workload) -> Path:
    name = workload.name
    folder = Path("blob", "workloads", found.catalog[name].op_type, name)
    return folder / f"{name}_{workload.id}.safetensors"


def _occurrences(found: Found) -> dict[str, Any]:
    return {
        "workloads": [
            {"definition": of.name, "uuid": of.id, "axes": of.axes, "times": of.times, "ns": of.ns,
             "at_most": of.at_most}
            for of in found.workloads.values()
        ],
        "without_definition": [
            {"op": op, "times": of.times, "ns": of.ns} for op, of in found.undescribed.items()
        ],
    }  # fmt: skip


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def load_definitions(dataset: Path) -> dict[str, dict[str, int]]:
    """The constant axes of each definition of a data set, by name. Raises `UsageError` for a folder
    that is not one, and for a file that is not a definition."""
    folder = dataset / "definitions"
    files = sorted(folder.rglob("*.json")) if folder.is_dir() else []
    if not files:
        raise UsageError(f"{dataset} is not a data set of flashinfer-bench: it has no definitions")
    found = {}
    for file in files:
        try:
            whole: Any = json.loads(file.read_bytes())
            axes = {name: of["value"] for name, of in whole["axes"].items() if "value" in of}
            found[str(whole["name"])] = axes
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UsageError(f"{file} is not a definition of flashinfer-bench") from None
    return found


def coverage_report(found: Found, there: dict[str, dict[str, int]] | None) -> Report:
    """A row for each definition, and for each op without one, with its share of the time of all
    kernels. `there` are the definitions of another data set, for the last column."""
    described = sum(of.ns for of in found.workloads.values())
    total = described + sum(of.ns for of in found.undescribed.values())
    rows: list[tuple[str, str | None, int | None, int, int, str]] = []
    for definition in found.catalog.values():
        workloads = [of for of in found.workloads.values() if of.name == definition.name]
        times, ns = sum(of.times for of in workloads), sum(of.ns for of in workloads)
        status = _status(definition, (there or {}).get(definition.name))
        rows.append((definition.name, definition.op_type, len(workloads), times, ns, status))
    rows += [(op, None, None, of.times, of.ns, NOT_FOUND) for op, of in found.undescribed.items()]
    rows.sort(key=lambda row: -row[4])
    columns = [
        *columns_of("text", "definition", "type"),
        *columns_of("count", "workloads", "times"),
        Column("time", "ns"),
        Column("share", "fraction"),
        Column("in the data set"),
    ]
    cells: list[list[Cell]] = [
        [*figures, ns, ns / total if total else None, status] for *figures, ns, status in rows
    ]
    if there is None:
        columns, cells = columns[:-1], [row[:-1] for row in cells]
    report = Report("Definitions", columns, cells)
    report.figures = {
        "time of all kernels": (total, "ns"),
        "described": (described / total if total else 0, "fraction"),
    }
    if there is not None:
        covered = sum(ns for *_, ns, status in rows if status == "found")
        share = covered / total if total else 0.0
        report.figures["covered"] = (share, "fraction")
        report.notes.append(
            f"The data set has a definition for {shown(share, 'fraction')} of the time."
        )
    if found.undescribed:
        report.notes.append("Rows without a type are ops that no definition describes.")
    if any(of.at_most for of in found.workloads.values()):
        report.notes.append(
            "The log does not record what some masks showed: their workloads see all cells."
        )
    report.notes += found.notes
    return report


def _status(definition: Definition, axes: dict[str, int] | None) -> str:
    """How the definition of that name in another data set, which has these axes, compares."""
    if axes is None:
        return NOT_FOUND
    differ = sorted(name for name, n in definition.fixed.items() if axes.get(name, n) != n)
    return f"{', '.join(differ)} differ" if differ else "found"
