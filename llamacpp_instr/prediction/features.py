"""What the time of a kernel depends on, from its graph: the same for a recording and for a dry run.

Invariant: pure functions of a graph, its plan, and what the tokens of the ubatch see.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from llamacpp_instr.log.graph.attention import Seen, Span, Ubatch
from llamacpp_instr.log.graph.kernels import plan_kernels
from llamacpp_instr.log.graph.ops import tensor
from llamacpp_instr.log.schema import Graph, Plan

REPACKED = "CPU_REPACK"
ATTENTION = "FLASH_ATTN_EXT"
SHORT, LONG, SHORT_WINDOW = " short", " long", 256
"""windows of attention, and the cells of the longest short one"""
ONE = ", one token"
"""ends the names of ops that were measured while one token was decoded"""
ALONE = " alone"
"""the same of attention, whose keys and values then come from further away"""


@dataclass(frozen=True)
class Product:
    """MUL_MAT and MUL_MAT_ID with a weight."""

    type: str
    """of the weight, in capitals"""
    repacked: bool
    experts: bool
    tokens: int
    """that one matrix multiplies; of experts, on average"""
    macs: float
    """multiplications"""
    inputs: float
    """elements of the activations, which ggml converts before it multiplies"""
    bytes: float
    """of the weights that are read"""


@dataclass(frozen=True)
class Other:
    """Any other kernel."""

    op: str
    """ops joined by +, and whether there is one token only, because its data then has left the
    caches: `ADD`, `ADD, one token`; attention with the length of a key, and whether the keys that a
    head reads fit into the nearest cache: `FLASH_ATTN_EXT 64 short`, `FLASH_ATTN_EXT 64 long
    tiled`, `FLASH_ATTN_EXT 64 long alone`"""
    rows: float
    """of the result, or of all heads, that the busiest thread computes"""
    units: float
    """bytes that it moves; of attention, cells of the window that it looks at"""
    flops: float
    """of products without a weight, and of attention"""


@dataclass(frozen=True)
class Features:
    """One entry for each kernel of a plan."""

    kernels: list[Product | Other]
    working_set: float
    """bytes that a compute reads and writes: weights, cache, activations"""


def features(graph: Graph, plan: Plan, ubatch: Ubatch | None, threads: int) -> Features:
    """What the times of the kernels of `plan` depend on; `graph` must have its nodes."""
    nodes = graph.whole
    kernels = plan_kernels(graph, plan)
    work = kernels.work(ubatch)
    found: list[Product | Other] = []
    tokens = max(
        (prod(nodes.ne[node][1:]) for node in plan.node if nodes.op[node] == "MUL_MAT"), default=1
    )
    for i, first in enumerate(plan.node):
        op, sources = nodes.op[first], nodes.src[first]
        if op in ("MUL_MAT", "MUL_MAT_ID") and sources[0] < 0:
            found.append(_product(graph, first, int(kernels.bytes[i])))
            continue
        label = kernels.label[i].split(" ")[0]
        rows, units = prod(nodes.ne[first][1:]), float(work.bytes[i])
        if i in kernels.attention:
            of = kernels.attention[i]
            window = SHORT if of.n_kv <= SHORT_WINDOW else LONG
            label += f" {tensor(graph, sources[0]).ne[0]}{window}{' tiled' * of.tiled}"
            label += ALONE * (tokens == 1)
            rows = of.rows * of.heads * of.streams
            units = float(rows * of.n_kv)
        elif tokens == 1:
            label += ONE
        at_once = -(-rows // threads) / max(1, rows)  # the share of the busiest thread
        flops = float(work.flops[i]) if i in kernels.attention or op.startswith("MUL_MAT") else 0.0
        found.append(Other(label, rows * at_once, units * at_once, flops * at_once))
    return Features(found, float(work.bytes.sum()))


def _product(graph: Graph, node: int, moved: int) -> Product:
    nodes = graph.whole
    sources = nodes.src[node]
    weight = graph.leaf(sources[0])
    n_bytes = float(moved - sum(tensor(graph, of).bytes for of in (*sources[1:], node)))
    length, results = weight.ne[0], prod(nodes.ne[node])
    experts = nodes.op[node] == "MUL_MAT_ID"
    tokens = prod(nodes.ne[node][1:])
    if experts:
        tokens = max(1, round(tokens / max(1, weight.ne[2])))
    return Product(
        weight.type.upper(),
        weight.buffer == REPACKED,
        experts,
        tokens,
        float(length * results),
        float(prod(tensor(graph, sources[1]).ne)),
        n_bytes,
    )


def ubatch_of(tokens: int, past: int, threads: int, cells: int) -> Ubatch:
    """What is known of the masks of consecutive tokens of one sequence, in a cache of `cells`."""
    seen = Seen(past + tokens, (Span(past, tokens),), True, True, cells)
    alone = (Span(0, tokens),)
    return Ubatch(threads, tokens, alone, (seen,), True, 0, True)
