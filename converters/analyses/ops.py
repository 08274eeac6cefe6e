"""The inventory of a graph: every distinct op, how often it occurs, and its standard operator.

Invariant: nodes are counted as the graph has them, before ggml fuses any. Two nodes are one op if
they have the same types, shapes and parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.terminal import counted
from llamacpp_instr.converters.analyses.tables import header
from llamacpp_instr.log.graph.attention import Ubatch, attention_work, attentions
from llamacpp_instr.log.graph.experts import choices
from llamacpp_instr.log.graph.kernels import node_backends, node_work, weight_read
from llamacpp_instr.log.graph.ops import VIEW_OPS, op_params, role_of, tensor
from llamacpp_instr.log.graph.words import OPSET, standard_operator
from llamacpp_instr.log.schema import Graph, Nodes
from llamacpp_instr.log.session import Session
from llamacpp_instr.log.steps import PHASES, counted_steps, step_rows
from llamacpp_instr.report.report import BOUND, AtMost, Cell, Column, Figures, Report

_UNSET = (0, "UNDEFINED", "NONE")
"""values of parameters that have no effect"""


@dataclass(frozen=True)
class Kind:
    """What makes two nodes the same op."""

    op: str
    params: tuple[tuple[str, int | float | str], ...]
    inputs: tuple[str, ...]
    """type and shape of each source"""
    output: str


@dataclass
class Count:
    """All nodes of one kind."""

    n: int = 0
    flops: int = 0
    bytes: int = 0
    bound: bool = False
    """whether `flops` and `bytes` are upper bounds"""
    weights: list[str] = field(default_factory=list)
    """roles of the weights that are read, each once"""


def count_ops(graph: Graph, ubatch: Ubatch | None = None) -> dict[Kind, Count]:
    """The ops of a graph, which must have its nodes, in the order of their first node. `ubatch` is
    what is known about its computes."""
    nodes = graph.whole
    attention = attentions(graph, node_backends(graph))
    chosen, used = choices(graph), ubatch.experts.by_node() if ubatch else {}
    found: dict[Kind, Count] = {}
    for i, op in enumerate(nodes.op):
        count = found.setdefault(_kind(graph, nodes, i), Count())
        flops, n_bytes = node_work(graph, i)
        if i in attention:
            flops, cells, bound = attention_work(attention[i], ubatch)
            n_bytes -= (attention[i].n_kv - cells) * attention[i].cell_bytes
            count.bound |= bound
        if i in chosen:
            unread, bound = chosen[i].unread_of(used)
            n_bytes -= unread
            count.bound |= bound
        count.n += 1
        count.flops += flops
        count.bytes += n_bytes
        weight, _ = weight_read(graph, [i])
        if weight and (role := role_of(op, nodes.name[i], weight)) not in count.weights:
            count.weights.append(role)
    return found


def ops_report(title: str, found: dict[Kind, Count]) -> Report:
    """A row for each kind of op, those that compute or move the most first."""
    rows: list[list[Cell]] = []
    missing = set()
    most_first = sorted(found.items(), key=lambda of: (-of[1].flops, -of[1].bytes))
    for number, (kind, count) in enumerate(most_first, 1):
        standard = standard_operator(kind.op, dict(kind.params))
        if not standard.onnx:
            missing.add(kind.op)
        work: list[Cell] = [count.flops or None, count.bytes or None]
        if count.bound:
            work = [AtMost(n) for n in (count.flops, count.bytes)]
        rows.append([
            str(number), kind.op, ", ".join(kind.inputs), kind.output, count.n, *work,
            ", ".join(count.weights) or None,
            ", ".join(f"{name}={_short(v)}" for name, v in kind.params),
            " + ".join(standard.onnx) or None, standard.torch or None,
        ])  # fmt: skip
    columns = header(
        Column("#", key="number"), "op", "inputs", "output", ("count", "count"), ("flop", "FLOPs"),
        ("bytes", "bytes"), "weights", "parameters", Column(f"ONNX, opset {OPSET}", key="onnx"),
        "PyTorch",
    )  # fmt: skip
    total = sum(count.n for count in found.values())
    views = sum(count.n for kind, count in found.items() if kind.op in VIEW_OPS)
    notes = [f"{counted(total, 'node')}; no kernel runs for {counted(views, 'view')} among them."]
    if missing:
        notes.append(f"No standard ONNX operator computes {', '.join(sorted(missing))}.")
    if any(count.bound for count in found.values()):
        notes.append(BOUND)
    figures: Figures = {"nodes": (total, "count"), "views": (views, "count")}
    return Report(title, columns, rows, notes, figures=figures, labels=2, key="ops")


def ops_of_log(session: Session) -> list[Report]:
    """A report for each phase: on the prefill with the most tokens, and on the graph that most
    decodes computed. Raises UsageError for a log without graphs."""
    steps, notes = counted_steps(session)
    row = step_rows(session, steps)
    chosen: dict[str, tuple[tuple[int, int], int, int, int]] = {}
    times: Counter[int] = Counter()
    for compute, graph, n_tokens in session.computes.tuples("compute", "graph", "n_tokens"):
        if compute not in row or session.graphs[graph].nodes is None:
            continue
        phase = steps["phase"][row[compute]]
        times[graph] += 1
        rank = (times[graph], n_tokens) if phase == "decode" else (n_tokens, times[graph])
        if phase not in chosen or rank > chosen[phase][0]:
            chosen[phase] = (rank, graph, compute, n_tokens)
    if not chosen:
        raise UsageError(f"{session.path}: no graphs; record with --level detailed")
    reports = []
    for phase in (phase for phase in PHASES if phase in chosen):
        _, graph, compute, n_tokens = chosen[phase]
        found = count_ops(session.graphs[graph], session.ubatches.get(compute))
        reports.append(ops_report(phase_title(phase, n_tokens), found))
    reports[-1].notes += [*notes, *session.log_end.notes()]
    return reports


def phase_title(phase: str, n_tokens: int) -> str:
    """`Ops of a prefill, 512 tokens`."""
    article = "an" if phase[0] in "aeiou" else "a"
    return f"Ops of {article} {phase}, {counted(n_tokens, 'token')}"


def _kind(graph: Graph, nodes: Nodes, i: int) -> Kind:
    params = op_params(nodes.op[i], nodes.params[i]) if nodes.params else {}
    given_params = tuple((name, value) for name, value in params.items() if value not in _UNSET)
    sources = (tensor(graph, source) for source in nodes.src[i])
    inputs = tuple(_typed(of.type, of.ne) for of in sources)
    return Kind(nodes.op[i], given_params, inputs, _typed(nodes.type[i], nodes.ne[i]))


def _typed(type_: str, ne: Sequence[int]) -> str:
    return f"{type_}[{'×'.join(str(n) for n in ne)}]"


def _short(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
