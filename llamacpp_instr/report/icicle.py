"""A tree as a picture that a page can zoom, with boxes whose widths are their amounts.

Invariant: names stay text. Without JavaScript it is a picture of the whole tree by its first
measure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llamacpp_instr.base.terminal import printable
from llamacpp_instr.report.page import Figure, escaped
from llamacpp_instr.report.report import scale_of, shown
from llamacpp_instr.report.tree import Node, Tree

ROW = 30
"""height of a box in pixels, enough for a finger"""
NARROW = 0.002
"""share of the width below which a box is not drawn; zooming shows it"""
READABLE = 22
"""width in pixels from which a box shows its name; the picture without JavaScript takes it as
thousandths of its own width"""
MOST = 20_000
"""boxes, zoomed or not; if there are more, the widest"""
COLORED = 3
"""the level whose names choose the colours: blocks"""


@dataclass
class Box:
    """A node of all trees: its parent's number, and its amount in each tree."""

    name: str
    parent: int
    depth: int
    color: int
    amounts: list[int]


def draw_icicle(title: str, trees: Sequence[Tree], notes: Sequence[str] = ()) -> Figure:
    """A figure of trees of the same session, one for each measure. The first one has every part of
    the others, in the same order."""
    boxes = _largest(_merged(trees))
    height = ROW * (max(box.depth for box in boxes) + 1)
    data = {
        "measures": [{"name": of.measure, **scale_of(of.unit)} for of in trees],
        "nodes": [[box.name, box.parent, box.color, *box.amounts] for box in boxes],
        "row": ROW,
        "narrow": NARROW,
        "readable": READABLE,
    }
    # the text of a script ends at the first `</script`, whatever surrounds it
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    buttons = "".join(
        f'<button type="button" aria-pressed="{str(not i).lower()}">{escaped(of.measure)}</button>'
        for i, of in enumerate(trees)
    )
    return Figure(
        title,
        f'<div class="icicle"><div class="measures" role="group" aria-label="measure" hidden>'
        f'{buttons}</div><div class="boxes" style="height:{height}px" role="group"'
        f' aria-label="{escaped(title)}">{_markup(boxes, trees[0])}</div>'
        '<p class="caption" aria-live="polite">&nbsp;</p>'
        f'<script type="application/json">{text}</script></div>',
        list(notes),
        _STYLE,
        SCRIPT,
    )


def _merged(trees: Sequence[Tree]) -> list[Box]:
    """Every node of the first tree, parents before children. Negative amounts, which only a wrong
    clock can cause, count as none."""
    boxes: list[Box] = []
    colors: dict[str, int] = {}

    def add(node: Node, others: Sequence[Node | None], parent: int, depth: int, color: int) -> Box:
        if depth == COLORED:
            color = colors.setdefault(node.name, len(colors) % (N_COLORS - 1) + 1)
        amounts = [max(of.own, 0) if of and not of.children else 0 for of in (node, *others)]
        box = Box(printable(node.name), parent, depth, color, amounts)
        at = len(boxes)
        boxes.append(box)
        by_name = [{c.name: c for c in of.children} if of else {} for of in others]
        for child in node.children:
            same = [of.get(child.name) for of in by_name]
            inner = add(child, same, at, depth + 1, color)
            box.amounts = [a + b for a, b in zip(box.amounts, inner.amounts, strict=True)]
        return box

    first, *others = [tree.root for tree in trees]
    add(first, others, -1, 0, 0)
    return boxes


def _largest(boxes: list[Box]) -> list[Box]:
    """The MOST nodes with the largest share in any measure. Parents have at least the share of
    their children, so they stay."""
    whole = [max(amount, 1) for amount in boxes[0].amounts]
    share = [max(a / of for a, of in zip(box.amounts, whole, strict=True)) for box in boxes]
    kept = sorted(sorted(range(len(boxes)), key=lambda i: (-share[i], i))[:MOST])
    number = {i: at for at, i in enumerate(kept)} | {-1: -1}
    return [replace(boxes[i], parent=number[boxes[i].parent]) for i in kept]


def _markup(boxes: Sequence[Box], tree: Tree) -> str:
    """The boxes of the whole tree, as the script draws them first."""
    whole = boxes[0].amounts[0]
    free = [0.0] * len(boxes)
    parts = []
    for i, box in enumerate(boxes):
        amount = box.amounts[0]
        width = amount / whole if whole else 0.0
        if i:
            free[i] = free[box.parent]
            free[box.parent] += width
        if width >= NARROW:
            tooltip = f"{box.name}: {shown(amount, tree.unit)}, {100 * width:.1f} %"
            name = escaped(box.name) if 1000 * width >= READABLE else ""
            # its first child begins where it begins
            parts.append(
                f'<button type="button" class="c{box.color}" title="{escaped(tooltip)}"'
                f' style="left:{100 * free[i]:.3f}%;width:{100 * width:.3f}%;'
                f'top:{ROW * box.depth}px">{name}</button>'
            )
    return "".join(parts)


N_COLORS = 9
_STYLE = """
.icicle .measures { margin-bottom: .5em }
.icicle .measures button { font: inherit; font-size: .9rem; padding: .35em .9em; cursor: pointer;
  border: 1px solid #8888; background: none; color: inherit }
.icicle .measures button:first-child { border-radius: .4em 0 0 .4em }
.icicle .measures button:last-child { border-radius: 0 .4em .4em 0 }
.icicle .measures button:only-child { border-radius: .4em }
.icicle .measures button[aria-pressed=true] { background: #3d8fc7; color: #fff }
.icicle .boxes { position: relative; overflow: hidden; touch-action: manipulation }
.icicle .boxes button { position: absolute; box-sizing: border-box; height: 29px; padding: 0;
  text-indent: 4px;
  border: 0; border-right: 1px solid Canvas; border-radius: 2px; font: 13px/29px system-ui,
  sans-serif; text-align: left; white-space: nowrap; overflow: hidden; text-overflow: ellipsis;
  cursor: pointer; color: #111 }
.icicle .boxes button.c0 { background: #8884; color: inherit }
.icicle .c1 { background: #8ec3e6 } .icicle .c2 { background: #f4bd75 }
.icicle .c3 { background: #93d3ac } .icicle .c4 { background: #d9b3d1 }
.icicle .c5 { background: #eda79b } .icicle .c6 { background: #d2d282 }
.icicle .c7 { background: #8dd3dc } .icicle .c8 { background: #c3c3c3 }
.icicle button:focus-visible { outline: 2px solid Highlight; outline-offset: -2px }
.icicle .caption { font-size: .9rem; min-height: 2.6em; line-height: 1.3; overflow-wrap: anywhere }
"""

# arrows move, Enter or a tap zooms in; Escape, or a tap on what is zoomed, zooms out
SCRIPT = """
"use strict";
for (const icicle of document.querySelectorAll(".icicle")) {
  const {measures, nodes, row, narrow, readable} =
      JSON.parse(icicle.querySelector("script").textContent);
  const boxes = icicle.querySelector(".boxes");
  const caption = icicle.querySelector(".caption");
  const choices = [...icicle.querySelectorAll(".measures button")];
  const depth = [], start = [], buttons = new Map();
  let measure = 0, zoomed = 0, current = 0;
  const amount = (i) => nodes[i][3 + measure];
  const parent = (i) => nodes[i][1];
  const isInside = (i, other) => {
    while (i > other) i = parent(i);
    return i === other;
  };
  const percent = (i, whole) => (100 * amount(i) / (amount(whole) || 1)).toFixed(1) + " %";
  const shown = (i) => {
    const {step, units} = measures[measure];
    let n = amount(i), unit = 0;
    for (; unit < units.length - 1 && n >= step * 0.9995; unit++) n /= step;
    const digits = unit === 0 || n >= 99.95 ? 0 : n >= 9.995 ? 1 : 2;
    return n.toFixed(digits) + " " + units[unit];
  };
  const describe = (i) => {
    const path = [];
    for (let at = i; at >= 0; at = parent(at)) path.unshift(nodes[at][0]);
    const of = parent(i) > 0 ? `, ${percent(i, parent(i))} of ${nodes[parent(i)][0]}` : "";
    caption.textContent = `${path.join(" \\u203a ")}: ${shown(i)}, ${percent(i, 0)} of all${of}`;
  };
  const place = () => {
    const free = [];
    nodes.forEach((node, i) => {
      depth[i] = i ? depth[node[1]] + 1 : 0;
      start[i] = i ? free[node[1]] : 0;
      free[i] = start[i];
      if (i) free[node[1]] += amount(i);
    });
  };
  const draw = () => {
    const whole = amount(zoomed) || 1;
    boxes.replaceChildren();
    buttons.clear();
    nodes.forEach((node, i) => {
      const above = isInside(zoomed, i);
      const width = above ? 1 : amount(i) / whole;
      if (!above && (width < narrow || !isInside(i, zoomed))) return;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "c" + node[2];
      button.textContent = width * boxes.clientWidth < readable ? "" : node[0];
      button.title = `${node[0]}: ${shown(i)}, ${percent(i, 0)}`;
      button.tabIndex = i === current ? 0 : -1;
      button.style.left = above ? "0" : 100 * (start[i] - start[zoomed]) / whole + "%";
      button.style.width = 100 * width + "%";
      button.style.top = row * depth[i] + "px";
      button.addEventListener("click", () => zoom(i === zoomed && i ? parent(i) : i));
      button.addEventListener("pointerenter", () => describe(i));
      button.addEventListener("focus", () => describe(i));
      buttons.set(i, button);
      boxes.append(button);
    });
    describe(current);
  };
  const zoom = (i) => {
    zoomed = current = i;
    draw();
    buttons.get(i).focus({preventScroll: true});
  };
  const move = (i) => {
    if (!buttons.has(i)) return;
    buttons.get(current).tabIndex = -1;
    current = i;
    buttons.get(i).tabIndex = 0;
    buttons.get(i).focus({preventScroll: true});
  };
  boxes.addEventListener("keydown", (event) => {
    const beside = [...buttons.keys()].filter((i) => depth[i] === depth[current]);
    const at = beside.indexOf(current);
    const next = {
      ArrowLeft: () => move(beside[at - 1]),
      ArrowRight: () => move(beside[at + 1]),
      ArrowUp: () => move(parent(current)),
      ArrowDown: () => move([...buttons.keys()].find((i) => parent(i) === current)),
      Escape: () => zoom(Math.max(parent(zoomed), 0)),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    next();
  });
  choices.forEach((choice, chosen) => choice.addEventListener("click", () => {
    measure = chosen;
    choices.forEach((other, i) => other.setAttribute("aria-pressed", i === chosen));
    zoomed = current = 0;
    place();
    draw();
  }));
  new ResizeObserver(() => draw()).observe(boxes);
  icicle.querySelector(".measures").hidden = false;
  place();
  draw();
}
"""
