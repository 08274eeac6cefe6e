"""Breakpoints: where to stop, and on which values.

A breakpoint is one line of words: a pattern of tensor names (`*`, `?`, `[…]`), `key=value` for
filters, and at the end `if` with a condition: `ffn_out-* layer=3-5 if absmax > 60`.
"""

from __future__ import annotations

import functools
import operator
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field

from llamacpp_instr.base.errors import UsageError
from llamacpp_instr.base.patterns import name_matches
from llamacpp_instr.debugger.graph import LiveGraph, Node
from llamacpp_instr.debugger.tensors import COUNTS, FIGURES, Array, finite_of
from llamacpp_instr.log.graph.ops import BLOCKS

_COMPARE = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_RANGES = ("layer", "step", "token")
_KEYS = ("op", "block", *_RANGES, "hits")
_TERM = re.compile(r"(\w+)(?:\s*(<=|>=|==|!=|<|>)\s*([-+.\w]+))?$")


@dataclass(frozen=True)
class Condition:
    """Comparisons of figures of a tensor's values, joined by `or` and `and` (which binds more)."""

    text: str
    alternatives: tuple[tuple[tuple[str, str, float], ...], ...]

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Raises `UsageError` for anything else. Nothing is evaluated as code."""
        alternatives = tuple(
            tuple(_comparison(term.strip(), text) for term in re.split(r"\band\b", part))
            for part in re.split(r"\bor\b", text)
        )
        return cls(text, alternatives)

    def holds(self, values: Array) -> bool:
        """Whether the values of a tensor satisfy it."""
        numbers, finite = finite_of(values)

        @functools.cache
        def figure(name: str) -> float:
            return COUNTS[name](numbers) if name in COUNTS else FIGURES[name](finite)

        return any(
            all(bool(_COMPARE[sign](figure(name), limit)) for name, sign, limit in terms)
            for terms in self.alternatives
        )


def _comparison(term: str, text: str) -> tuple[str, str, float]:
    match = _TERM.match(term)
    names = (*FIGURES, *COUNTS)
    if not match or match[1] not in names:
        raise UsageError(
            f"condition {text!r}: {term!r} is not a comparison like `absmax > 60`; "
            f"the figures are {', '.join(names)}"
        )
    if match[2] is None:
        if match[1] not in COUNTS:
            raise UsageError(f"condition {text!r}: compare {match[1]} with a number")
        return match[1], ">", 0.0
    try:
        return match[1], match[2], float(match[3])
    except ValueError:
        raise UsageError(f"condition {text!r}: {match[3]!r} is not a number") from None


@dataclass
class Breakpoint:
    """Where a compute stops. `hits` counts how often the place was reached and the condition
    held."""

    text: str
    pattern: str = "*"
    op: str | None = None
    block: str | None = None
    ranges: dict[str, range] = field(default_factory=dict)
    condition: Condition | None = None
    from_hit: int = 1
    """the first hit that stops"""
    sources: tuple[str, ...] = ()
    """names of what the node reads, if others have its name and op"""
    hits: int = 0
    number: int = 0
    once: bool = False
    """removed when it has stopped"""

    @classmethod
    def parse(cls, text: str) -> Breakpoint:
        """Raises `UsageError` for a word that is not understood."""
        place, _, condition = f" {text} ".partition(" if ")
        try:
            words = shlex.split(place)
        except ValueError as error:
            raise UsageError(f"breakpoint {text!r}: {error}") from None
        self = cls(text.strip())
        names = []
        for word in words:
            key, equals, value = word.partition("=")
            if not equals:
                names.append(word)
            elif key in _RANGES:
                self.ranges[key] = _range(text, key, value)
            elif key == "op":
                self.op = value.upper()
            elif key == "block":
                if value not in BLOCKS:
                    raise UsageError(f"breakpoint {text!r}: block is one of {', '.join(BLOCKS)}")
                self.block = value
            elif key == "hits":
                self.from_hit = _range(text, key, value).start
            else:
                raise UsageError(f"breakpoint {text!r}: {key!r} is none of {', '.join(_KEYS)}")
        if names:
            self.pattern = " ".join(names)
        if condition.strip():
            self.condition = Condition.parse(condition.strip())
        elif not words:
            raise UsageError("a breakpoint needs a pattern, a filter or a condition")
        return self

    def applies(self, step: int, positions: frozenset[int]) -> bool:
        """Whether a compute of this step and of tokens at these positions can stop here."""
        of_step, of_token = self.ranges.get("step"), self.ranges.get("token")
        return (of_step is None or step in of_step) and (
            of_token is None or any(position in of_token for position in positions)
        )

    def matches(self, node: Node) -> bool:
        """Whether a node is one of those where it stops."""
        layers = self.ranges.get("layer")
        return (
            node.runs
            and (self.op is None or node.op == self.op)
            and (self.block is None or node.block == self.block)
            and (layers is None or node.layer in layers)
            and name_matches(node.name, self.pattern)
            and (not self.sources or self.sources == node.reads)
        )

    def reached(self, values: Callable[[], Array]) -> bool:
        """Counts a hit, and returns whether to stop. `values` reads the node's."""
        if self.condition is not None and not self.condition.holds(values()):
            return False
        self.hits += 1
        return self.hits >= self.from_hit

    def check(self, graph: LiveGraph) -> None:
        """Raises `UsageError`, with the nearest names, if no node of the graph can match."""
        if any(self.matches(node) for node in graph.nodes):
            return
        why = graph.why_no_op(self.pattern)
        node = graph.nodes[graph.by_name.get(self.pattern, 0)]
        if node.name == self.pattern and node.runs:  # other filters exclude it
            why = f"; it is {node}"
        raise UsageError(f"breakpoint {self.text!r}: no op of the graph matches{why}")


def _range(text: str, key: str, value: str) -> range:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", value)
    if not match:
        raise UsageError(f"breakpoint {text!r}: {key} is a number or a range like 3-5")
    first = int(match[1])
    return range(first, int(match[2] or first) + 1)
