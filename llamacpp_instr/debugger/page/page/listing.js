// The listing as source text (only the lines in sight are elements), and the map of it.

import { $, make } from "./parts.js";

const LINE = 22; // pixels
const MARGIN = 12; // lines beyond what is in sight

// Lines to {line, text, name, purpose, layer, block, op}; headings have no name.
export function parse(content) {
  let layer = -1, block = "";
  return content.replace(/\n$/, "").split("\n").map((text, i) => {
    if (text.startsWith("# ")) {
      const [, of, rest] = /^# (?:layer (\d+): )?(.*)$/.exec(text);
      [layer, block] = [of === undefined ? -1 : +of, rest];
      return { line: i + 1, text, name: null, layer, block };
    }
    const cut = text.lastIndexOf("  # ");
    const statement = text.slice(0, cut).trim();
    const split = statement.indexOf(": ");
    const op = /\] = (\w+)\(/.exec(statement);
    return { line: i + 1, text: statement, name: statement.slice(0, split), rest: statement.slice(split),
      purpose: text.slice(cut + 4), layer, block, op: op ? op[1] : "" };
  });
}

export class Listing {
  lines = [];
  here = 0;
  #marks = new Map();
  #drawn = "";

  // `act` has breakpoint(line), show(line) and until(line)
  constructor(act) {
    this.act = act;
    this.box = $("listing");
    this.inner = this.box.appendChild(make("div"));
    this.box.addEventListener("scroll", () => this.#draw());
    new ResizeObserver(() => this.#draw()).observe(this.box);
  }

  fill(lines) {
    this.lines = lines;
    this.inner.style.height = `${lines.length * LINE}px`;
    this.#redraw();
  }

  // Where the model is; 0 while it runs.
  stand(line, scroll) {
    this.here = line;
    if (scroll && line) {
      const top = (line - 1) * LINE;
      const from = this.box.scrollTop, to = from + this.box.clientHeight;
      if (top < from + 2 * LINE || top > to - 3 * LINE) this.box.scrollTop = top - this.box.clientHeight / 3;
    }
    this.#redraw();
  }

  // line → {verified, condition}
  mark(marks) {
    this.#marks = marks;
    this.#redraw();
  }

  reveal(line) {
    this.box.scrollTop = (line - 1) * LINE - this.box.clientHeight / 3;
  }

  #redraw() {
    this.#drawn = "";
    this.#draw();
  }

  #draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / LINE) - MARGIN);
    const end = Math.min(this.lines.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / LINE) + MARGIN);
    if (this.#drawn === `${first} ${end}`) return;
    this.#drawn = `${first} ${end}`;
    const shown = this.lines.slice(first, end).map((line) => (line.name === null ? this.#heading(line) : this.#row(line)));
    const focused = document.activeElement;
    const again = focused && this.inner.contains(focused) ? `[data-line="${focused.closest(".line").dataset.line}"] .${focused.className}` : "";
    this.inner.replaceChildren(...shown);
    if (again) this.inner.querySelector(again)?.focus({ preventScroll: true });
  }

  #place(line, kind, ...children) {
    const row = make("div", { class: `line ${kind}`, "data-line": line.line }, ...children);
    row.style.top = `${(line.line - 1) * LINE}px`;
    return row;
  }

  #heading(line) {
    return this.#place(line, "heading", make("span", { text: line.text.slice(2) }));
  }

  #row(line) {
    const mark = this.#marks.get(line.line);
    const now = line.line === this.here;
    const point = make("button", {
      class: "point", type: "button", "aria-pressed": String(Boolean(mark)),
      title: mark ? "Remove the breakpoint" : "Stop after this op, every time",
      "aria-label": `Breakpoint at line ${line.line}`, text: mark ? (mark.condition ? "◆" : "●") : "○",
      onclick: () => this.act.breakpoint(line.line),
    });
    const name = make("button", { class: "name", type: "button", text: line.name,
      title: `${line.text}\n${line.purpose}\n\nClick to look at its values`, onclick: () => this.act.show(line) });
    const run = make("button", { class: "run", type: "button", text: "run to", title: "Run until this op has run, once",
      onclick: () => this.act.until(line) });
    const kind = `op${now ? " now" : ""}${this.here && line.line <= this.here ? " ran" : ""}`;
    return this.#place(line, kind, point, make("span", { class: "at", text: now ? "▶" : String(line.line) }),
      name, make("span", { class: "rest", text: line.rest, title: line.text }),
      make("span", { class: "purpose", text: line.purpose, title: line.purpose }), run);
  }
}

// Layers × blocks, with the place of the stop; `until(line)` runs to the first op of a cell.
export function drawMap(lines, here, until) {
  const layers = new Map(), blocks = [];
  for (const line of lines) {
    if (line.name === null) continue;
    if (!blocks.includes(line.block)) blocks.push(line.block);
    if (!layers.has(line.layer)) layers.set(line.layer, new Map());
    const row = layers.get(line.layer);
    if (!row.has(line.block)) row.set(line.block, []);
    row.get(line.block).push(line);
  }
  const at = here ? lines[here - 1] : null;
  const cell = (layer, block) => {
    const ops = layers.get(layer).get(block);
    if (!ops) return make("td");
    const ran = here ? ops.filter((op) => op.line <= here).length : 0;
    const now = at && at.layer === layer && at.block === block;
    const state = now ? "now" : ran === ops.length ? "ran" : ran ? "part" : "ahead";
    const label = now ? "▶" : ran === ops.length ? "✓" : "";
    const where = `${layer < 0 ? "" : `layer ${layer}, `}${block}: ${ops.length} op${ops.length > 1 ? "s" : ""}`;
    return make("td", {}, make("button", { type: "button", class: state, text: label,
      "data-layer": layer, "data-block": block,
      title: `${where}\nClick to run until its first op has run`, "aria-label": `Run to ${where}`,
      onclick: () => until(ops[0]) }));
  };
  const head = make("tr", {}, make("th", { text: "layer" }), ...blocks.map((block) => make("th", { scope: "col", text: block })));
  const order = [...layers.keys()].sort((a, b) => a - b);
  const rows = order.map((layer) => make("tr", {}, make("th", { scope: "row", text: layer < 0 ? "none" : String(layer) }),
    ...blocks.map((block) => cell(layer, block))));
  const map = $("map"), box = map.parentElement;
  map.replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
  const row = map.querySelector(".now")?.closest("tr");
  if (row && (row.offsetTop < box.scrollTop + 40 || row.offsetTop > box.scrollTop + box.clientHeight - 40))
    box.scrollTop = row.offsetTop - box.clientHeight / 2;
}
