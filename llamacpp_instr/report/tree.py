"""A tree whose leaves have amounts, and its forms: text, a table, folded stacks, speedscope.

Invariant: the amount of a node is the sum of its children's, in every form.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from llamacpp_instr.base.terminal import printable
from llamacpp_instr.report.report import Cell, Column, Report

SMALL = 0.01
"""share of the whole; text joins the children of a node that have less"""


@dataclass
class Node:
    """A node; only leaves have an amount of their own."""

    name: str
    own: int = 0
    children: list[Node] = field(default_factory=list)

    @cached_property
    def amount(self) -> int:
        """Its own, or the sum of its children's."""
        return sum(child.amount for child in self.children) if self.children else self.own

    def stacks(self) -> Iterator[tuple[list[str], int]]:
        """The names from this node to each leaf below it, with the leaf's amount."""
        if not self.children:
            yield [self.name], self.own
        for child in self.children:
            for names, amount in child.stacks():
                yield [self.name, *names], amount


@dataclass(frozen=True)
class Tree:
    """Amounts of one kind; notes are complete sentences."""

    root: Node
    measure: str
    """what is measured, as a heading: `time`"""
    unit: Literal["ns", "bytes", "flop"]
    levels: Sequence[str]
    """what the nodes below the root are, level by level"""
    notes: list[str] = field(default_factory=list)

    def stacks(self) -> Iterator[tuple[list[str], int]]:
        """The names from the root to each leaf, with the leaf's amount."""
        return self.root.stacks()


def outline(tree: Tree) -> Report:
    """The tree as indented rows with amount and share of the whole. Children below SMALL, except
    those of the root, are joined in one row, so the rows still add up; a node whose children are
    all that small is shown alone."""
    whole = tree.root.amount
    rows: list[list[Cell]] = []

    def add(node: Node, head: str, below: str) -> None:
        rows.append([head + node.name, node.amount, node.amount / whole if whole else None])
        least = SMALL * whole if node is not tree.root else 0
        shown = [of for of in node.children if of.amount >= least and of.amount]
        small = [of for of in node.children if of.amount < least and of.amount]
        if shown and small:
            name = small[0].name if len(small) == 1 else f"{len(small)} others"
            shown.append(Node(name, sum(of.amount for of in small)))
        for child in shown:
            last = child is shown[-1]
            add(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))

    add(tree.root, "", "")
    columns = [Column("part"), Column(tree.measure, tree.unit), Column("share", "share")]
    title = f"{tree.root.name} by {tree.measure}".capitalize()
    return Report(title, columns, rows, tree.notes, key=_key(tree))


def leaves(tree: Tree) -> Report:
    """A row for each leaf, with the names of its ancestors below the root in columns of their own.
    A leaf that is not on the last level leaves the deeper columns empty."""
    whole = tree.root.amount
    rows: list[list[Cell]] = []
    for names, amount in tree.stacks():
        row: list[Cell] = [*names[1:]]
        row += [None] * (len(tree.levels) - len(row))
        rows.append([*row, amount, amount / whole if whole else None])
    columns = [*map(Column, tree.levels), Column(tree.measure, tree.unit)]
    title = f"{tree.root.name} by {tree.measure}".capitalize()
    columns.append(Column("share", "fraction"))
    return Report(title, columns, rows, tree.notes, key=_key(tree))


def _key(tree: Tree) -> str:
    """The name for scripts; that of any tree but the session's follows from its title."""
    return "tree" if tree.root.name == "session" else ""


def render_folded(tree: Tree) -> str:
    """The tree as folded stacks, for flamegraph.pl and the tools that read its format: a line per
    leaf, its names joined by semicolons, then a space and the amount.

    https://github.com/brendangregg/FlameGraph. Control characters in names are escaped, and a
    semicolon becomes a comma. Leaves without an amount are left out.
    """
    lines = (
        ";".join(printable(name).replace(";", ",") for name in names) + f" {amount}\n"
        for names, amount in tree.stacks()
        if amount > 0
    )
    return "".join(lines)


def render_speedscope(tree: Tree, name: str) -> str:
    """The tree as a file for speedscope.app: one sampled profile, a sample per leaf.

    https://www.speedscope.app/file-format-schema.json. `name` is the title of the profile. Leaves
    without an amount are left out.
    """
    frames: dict[str, int] = {}
    samples, weights = [], []
    for names, amount in tree.stacks():
        if amount > 0:
            samples.append([frames.setdefault(printable(n), len(frames)) for n in names])
            weights.append(amount)
    units = {"ns": "nanoseconds", "bytes": "bytes"}
    profile = {
        "type": "sampled",
        "name": printable(name),
        "unit": units.get(tree.unit, "none"),
        "startValue": 0,
        "endValue": sum(weights),
        "samples": samples,
        "weights": weights,
    }
    file = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "shared": {"frames": [{"name": frame} for frame in frames]},
        "profiles": [profile],
        "name": printable(name),
        "activeProfileIndex": 0,
        "exporter": "llamacpp-instr",
    }
    return json.dumps(file) + "\n"
