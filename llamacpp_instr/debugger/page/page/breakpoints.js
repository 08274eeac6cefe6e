// The breakpoints: lines of listings, our own words, NaN and infinity. The protocol wants all of a
// kind at once.

import { $, make } from "./parts.js";

export class Breakpoints {
  #asked = { lines: {}, functions: [], filters: [] };
  #placed = new Map(); // "reference line" or "function i" → what the adapter answered

  // `listing` shows those in lines; `fail(error)` tells what went wrong
  constructor(connection, listing, fail) {
    this.connection = connection;
    this.listing = listing;
    this.fail = fail;
    this.reference = "";
    $("add-break").addEventListener("submit", (event) => {
      event.preventDefault();
      const name = $("break-text").value.trim();
      if (!name) return;
      this.#asked.functions.push({ name });
      $("break-text").value = "";
      this.#functions();
    });
    for (const name of ["nan", "inf"])
      $(`on-${name}`).addEventListener("change", () => this.#filters());
  }

  // What all browsers together have set. To `ask` for the same again changes nothing, but tells what
  // became of it.
  async restore(asked, ask) {
    this.#asked = structuredClone(asked);
    for (const name of ["nan", "inf"]) $(`on-${name}`).checked = this.#asked.filters.includes(name);
    this.#placed.clear();
    this.#draw();
    if (!ask) return;
    for (const reference of Object.keys(this.#asked.lines)) await this.#lines(reference);
    if (this.#asked.functions.length) await this.#functions();
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
    this.#lines(this.reference);
  }

  // An event of the adapter: a breakpoint was verified, or refused, later.
  changed(placed) {
    for (const [key, known] of this.#placed) if (known.id === placed.id) this.#placed.set(key, { ...known, ...placed });
    this.#draw();
  }

  async #lines(reference) {
    const wanted = this.#asked.lines[reference];
    await this.#set("setBreakpoints", { source: { sourceReference: +reference }, breakpoints: wanted },
      (i) => `${reference} ${wanted[i].line}`);
  }

  async #functions() {
    await this.#set("setFunctionBreakpoints", { breakpoints: this.#asked.functions }, (i) => `function ${i}`);
  }

  async #filters() {
    this.#asked.filters = ["nan", "inf"].filter((name) => $(`on-${name}`).checked);
    await this.connection.request("setExceptionBreakpoints", { filters: this.#asked.filters }).catch(this.fail);
  }

  async #set(command, args, key) {
    try {
      const { breakpoints } = await this.connection.request(command, args);
      breakpoints.forEach((placed, i) => this.#placed.set(key(i), placed));
    } catch (error) {
      this.fail(error);
    }
    this.#draw();
  }

  // [key, what is asked, the words, how to remove it, whether it has a condition of its own]
  #all() {
    const lines = Object.entries(this.#asked.lines).flatMap(([reference, all]) =>
      all.map((one) => [`${reference} ${one.line}`, one, reference]));
    return [...lines, ...this.#asked.functions.map((one, i) => [`function ${i}`, one, null])];
  }

  #draw() {
    const marks = (this.#asked.lines[this.reference] ?? []).map((one) => {
      const placed = this.#placed.get(`${this.reference} ${one.line}`);
      return [placed?.line || one.line, one];
    });
    this.listing.mark(new Map(marks));
    const rows = this.#all().map(([key, one, reference]) => this.#row(key, one, reference));
    $("breaks").replaceChildren(...rows);
    $("no-breaks").hidden = rows.length > 0;
  }

  #row(key, one, reference) {
    const placed = this.#placed.get(key);
    const words = reference === null ? one.name : this.#named(one.line, reference);
    const change = (edit) => {
      edit();
      return reference === null ? this.#functions() : this.#lines(reference);
    };
    const remove = make("button", { type: "button", text: "Remove", onclick: () => change(() => {
      const all = reference === null ? this.#asked.functions : this.#asked.lines[reference];
      all.splice(all.indexOf(one), 1);
    }) });
    const condition = make("input", { type: "text", value: one.condition ?? "", placeholder: "absmax > 60 or nan",
      "aria-label": `Condition of ${words}`, spellcheck: "false",
      onchange: (event) => change(() => { one.condition = event.target.value.trim() || undefined; }) });
    const hits = make("input", { type: "text", value: one.hitCondition ?? "", placeholder: "1", class: "few",
      "aria-label": `First hit of ${words} that stops`,
      onchange: (event) => change(() => { one.hitCondition = event.target.value.trim() || undefined; }) });
    const row = make("li", {}, make("code", { text: words }),
      make("label", {}, "if ", condition), make("label", {}, "from hit ", hits), remove);
    if (placed?.message) row.append(make("p", { class: "problem", text: placed.message }));
    return row;
  }

  #named(line, reference) {
    const known = reference === this.reference ? this.listing.lines[line - 1] : null;
    return known?.name ? `${known.name} (line ${line})` : `graph-${reference}, line ${line}`;
  }
}
