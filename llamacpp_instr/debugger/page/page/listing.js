// The listing as source text (only the lines in sight are elements), the map of it, and breakpoints.

import { $, button, make, row } from "./common.js";

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

  #redraw() {
    this.#drawn = "";
    this.#draw();
  }

  #draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / LINE) - MARGIN);
    const end = Math.min(this.lines.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / LINE) + MARGIN);
    if (this.#drawn === `${first} ${end}`) return;
    this.#drawn = `${first} ${end}`;
    const shown = this.lines.slice(first, end).map((line) => this.#line(line));
    const focused = document.activeElement;
    const again = focused && this.inner.contains(focused) ? `[data-line="${focused.closest(".line").dataset.line}"] .${focused.className}` : "";
    this.inner.replaceChildren(...shown);
    if (again) this.inner.querySelector(again)?.focus({ preventScroll: true });
  }

  #line(line) {
    const now = line.line === this.here;
    const kind = line.name === null ? "heading" : `op${now ? " now" : ""}${this.here && line.line <= this.here ? " ran" : ""}`;
    const cells = line.name === null ? [make("span", {}, line.text.slice(2))] : this.#op(line, now);
    const element = make("div", { class: `line ${kind}`, "data-line": line.line }, ...cells);
    element.style.top = `${(line.line - 1) * LINE}px`;
    return element;
  }

  #op(line, now) {
    const mark = this.#marks.get(line.line);
    return [
      button(mark ? (mark.condition ? "◆" : "●") : "○", () => this.act.breakpoint(line.line), {
        class: "point", "aria-pressed": Boolean(mark), "aria-label": `Breakpoint at line ${line.line}`,
        title: mark ? "Remove the breakpoint" : "Stop after this op, every time" }),
      make("span", { class: "at" }, now ? "▶" : line.line),
      button(line.name, () => this.act.show(line),
        { class: "name", title: `${line.text}\n${line.purpose}\n\nClick to look at its values` }),
      make("span", { class: "rest", title: line.text }, line.rest),
      make("span", { class: "purpose", title: line.purpose }, line.purpose),
      button("run to", () => this.act.until(line), { class: "run", title: "Run until this op has run, once" }),
    ];
  }
}

// Layers × blocks, with the place of the stop; `until(line)` runs to the first op of a cell.
export function drawMap(lines, here, until) {
  const layers = new Map(), blocks = [];
  for (const line of lines) {
    if (line.name === null) continue;
    if (!blocks.includes(line.block)) blocks.push(line.block);
    if (!layers.has(line.layer)) layers.set(line.layer, {});
    (layers.get(line.layer)[line.block] ??= []).push(line);
  }
  const at = lines[here - 1];
  const cell = (layer, block) => {
    const ops = layers.get(layer)[block];
    if (!ops) return make("td");
    const ran = ops.filter((op) => op.line <= here).length;
    const now = at.layer === layer && at.block === block;
    const state = now ? "now" : ran === ops.length ? "ran" : ran ? "part" : "ahead";
    const where = `${layer < 0 ? "" : `layer ${layer}, `}${block}: ${ops.length} op${ops.length > 1 ? "s" : ""}`;
    return make("td", {}, button({ now: "▶", ran: "✓" }[state] ?? "", () => until(ops[0]),
      { class: state, "data-layer": layer, "data-block": block,
        title: `${where}\nClick to run until its first op has run`, "aria-label": `Run to ${where}` }));
  };
  const heads = blocks.map((block) => make("th", { scope: "col" }, block));
  const rows = [...layers.keys()].sort((a, b) => a - b).map((layer) =>
    row("td", [make("th", { scope: "row" }, layer < 0 ? "none" : layer), ...blocks.map((block) => cell(layer, block))]));
  const map = $("map"), box = map.parentElement;
  map.replaceChildren(make("thead", {}, row("th", ["layer", ...heads])), make("tbody", {}, ...rows));
  const line = map.querySelector(".now")?.closest("tr");
  if (line && (line.offsetTop < box.scrollTop + 40 || line.offsetTop > box.scrollTop + box.clientHeight - 40))
    box.scrollTop = line.offsetTop - box.clientHeight / 2;
}

const FILTERS = ["nan", "inf"];

// The breakpoints: lines of listings, our own words, NaN and infinity. The protocol wants all of a
// kind at once.
export class Breakpoints {
  #asked = { lines: {}, functions: [], filters: [] };
  #placed = new Map(); // what is asked → what the adapter answered

  // `listing` shows those on lines; `fail(error)` tells what went wrong
  constructor(connection, listing, fail) {
    Object.assign(this, { connection, listing, fail, reference: "" });
    $("add-break").addEventListener("submit", (event) => {
      event.preventDefault();
      const name = $("break-text").value.trim();
      if (!name) return;
      this.#asked.functions.push({ name });
      $("break-text").value = "";
      this.#set(null);
    });
    for (const name of FILTERS) $(`on-${name}`).addEventListener("change", () => this.#setFilters());
  }

  // What all browsers together have set. To `ask` for the same again changes nothing, but returns the
  // result.
  async restore(asked, ask) {
    this.#asked = structuredClone(asked);
    for (const name of FILTERS) $(`on-${name}`).checked = this.#asked.filters.includes(name);
    this.#placed.clear();
    this.#draw();
    if (!ask) return;
    for (const reference of Object.keys(this.#asked.lines)) await this.#set(reference);
    if (this.#asked.functions.length) await this.#set(null);
  }

  look(reference) {
    this.reference = String(reference);
    this.#draw();
  }

  toggle(line) {
    const all = (this.#asked.lines[this.reference] ??= []);
    const at = all.findIndex((one) => one.line === line);
    if (at < 0) all.push({ line });
    else all.splice(at, 1);
    this.#set(this.reference);
  }

  // An event of the adapter: a breakpoint was verified, or refused, later.
  changed(placed) {
    for (const [one, known] of this.#placed) if (known.id === placed.id) this.#placed.set(one, { ...known, ...placed });
    this.#draw();
  }

  // Those of a listing, or our own words if `reference` is null.
  #of(reference) {
    return reference === null ? this.#asked.functions : this.#asked.lines[reference] ?? [];
  }

  async #set(reference) {
    const wanted = [...this.#of(reference)];
    const source = { sourceReference: +reference };
    try {
      const { breakpoints } = reference === null
        ? await this.connection.request("setFunctionBreakpoints", { breakpoints: wanted })
        : await this.connection.request("setBreakpoints", { source, breakpoints: wanted });
      breakpoints.forEach((placed, i) => this.#placed.set(wanted[i], placed));
    } catch (error) {
      this.fail(error);
    }
    this.#draw();
  }

  async #setFilters() {
    this.#asked.filters = FILTERS.filter((name) => $(`on-${name}`).checked);
    await this.connection.request("setExceptionBreakpoints", { filters: this.#asked.filters }).catch(this.fail);
  }

  #draw() {
    this.listing.mark(new Map(this.#of(this.reference).map((one) => [this.#placed.get(one)?.line || one.line, one])));
    const rows = [...Object.keys(this.#asked.lines), null].flatMap((reference) =>
      this.#of(reference).map((one) => this.#row(one, reference)));
    $("breaks").replaceChildren(...rows);
    $("no-breaks").hidden = rows.length > 0;
  }

  #row(one, reference) {
    const words = reference === null ? one.name : this.#named(one.line, reference);
    const remove = () => {
      const all = this.#of(reference);
      all.splice(all.indexOf(one), 1);
      this.#set(reference);
    };
    const input = (key, attributes) => make("input", { type: "text", value: one[key] ?? "", ...attributes,
      onchange: (event) => {
        one[key] = event.target.value.trim() || undefined;
        this.#set(reference);
      } });
    const condition = input("condition",
      { placeholder: "absmax > 60 or nan", "aria-label": `Condition of ${words}`, spellcheck: "false" });
    const hits = input("hitCondition", { placeholder: "1", class: "few", "aria-label": `First hit of ${words} that stops` });
    const { message } = this.#placed.get(one) ?? {};
    return make("li", {}, make("code", {}, words), make("label", {}, "if ", condition), make("label", {}, "from hit ", hits),
      button("Remove", remove), ...(message ? [make("p", { class: "problem" }, message)] : []));
  }

  #named(line, reference) {
    const known = reference === this.reference ? this.listing.lines[line - 1] : null;
    return known?.name ? `${known.name} (line ${line})` : `graph-${reference}, line ${line}`;
  }
}
