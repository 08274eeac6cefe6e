// The weights of a model: a map of its tensors, and the chosen one as a picture with its figures.
//
// Names come from a model: they are only ever text.

import { colorOf, onTheme } from "./colors.js";
import { button, count, make, row } from "./common.js";
import { channelLists, drawLine, histogram, label, legend, numbers } from "./figures.js";
import { exact, Panes, short } from "./panes.js";

const FIGURES = {
  rms: ["root mean square", (of) => of.rms],
  largest: ["largest weight, in standard deviations", (of) => of.std ? of.largest / of.std : null],
  kurtosis: ["kurtosis", (of) => of.kurtosis],
  outliers: ["outlier rows and columns", (of) => of.row_norms && of.row_norms.n_outliers + of.column_norms.n_outliers],
  bits: ["bits per weight", (of, tensor) => 8 * tensor.bytes / tensor.ne.reduce((a, b) => a * b, 1)],
};
const POLL_MS = 500;

const PARTS = `
<header><h1></h1><p class="state" role="status"></p></header>
<section>
  <h2>Tensors by layer and role</h2>
  <p class="key"><label>Coloured by <select class="figure"></select></label> <span class="range"></span></p>
  <div class="map"></div>
</section>
<section class="tensor" hidden>
  <h2 class="name"></h2>
  <p class="facts"></p>
  <p class="troubles"></p>
  <div class="matrix">
    <form class="tools">
      <label>A cell shows <select class="measure">
        <option value="largest">the largest of its weights, with its sign</option>
        <option value="rms">the root mean square of its weights</option></select></label>
      <span class="zoom"><button type="button" class="closer" aria-label="Zoom in">+</button>
      <button type="button" class="wider" aria-label="Zoom out">−</button>
      <button type="button" class="whole">Whole</button></span>
      <span class="go"><label>row <input class="row" inputmode="numeric" size="6"></label>
      <label>column <input class="column" inputmode="numeric" size="6"></label>
      <button>Go</button></span>
    </form>
    <div class="panes"></div>
    <p class="level key" role="status"></p>
    <p class="cell" role="status"></p>
    <div class="near"></div>
  </div>
  <div class="vectors"></div>
  <div class="about">
    <div><h3>Distribution</h3><div class="histogram"></div><table class="numbers"></table></div>
    <div><h3>Unusually large rows and columns</h3><div class="channels"></div></div>
  </div>
</section>`;

// Fill `place` with the page's part; `base` is where the routes are mounted, "" or with a slash.
export async function mount(place, base) {
  place.classList.add("weights");
  place.innerHTML = PARTS;
  const part = new Part(place, base);
  await part.begin();
}

class Part {
  constructor(place, base) {
    this.base = base;
    this.get = (selector) => place.querySelector(selector);
    this.figures = new Map();
    this.panes = new Panes((...at) => this.fetchTile(...at), () => this.showCell());
    this.shown = null;
  }

  async ask(path) {
    const answer = await fetch(this.base + path).catch(() => null);
    if (answer?.ok) return answer;
    this.get(".state").textContent = answer ? await answer.text() : "The server has ended.";
    return null;
  }

  async json(path) {
    const answer = await this.ask(path);
    return answer && answer.json();
  }

  async begin() {
    const listing = await this.json("tensors");
    if (!listing) return;
    Object.assign(this, listing);
    this.get("h1").textContent = this.models.join(" against ");
    const select = this.get(".figure");
    for (const [name, [text]] of Object.entries(FIGURES)) select.add(new Option(text, name));
    select.onchange = () => this.colorMap();
    this.makeMap();
    onTheme(() => this.colorMap());
    this.get(".measure").onchange = () => this.working(() => this.showMatrix());
    this.get(".closer").onclick = () => this.panes.zoom(2);
    this.get(".wider").onclick = () => this.panes.zoom(0.5);
    this.get(".whole").onclick = () => this.panes.whole();
    this.get(".tools").onsubmit = (event) => {
      event.preventDefault();
      const number = (input, n) => input.value.trim() === "" ? null : Math.max(0, Math.min(n - 1, parseInt(input.value) || 0));
      const row = number(this.get(".row"), this.details.rows), column = number(this.get(".column"), this.details.columns);
      if (row !== null || column !== null) this.panes.goTo(row, column);
    };
    const largest = this.tensors.findIndex((of) => of.layer >= 0 && of.ne.length > 1 && !of.trouble);
    await Promise.all([this.poll(), this.show(Math.max(0, largest))]);
  }

  async poll() {
    for (;;) {
      const answer = await this.json(`figures?begin=${this.figures.size}`);
      if (!answer) return;
      const { over, figures } = answer;
      for (const of of figures) this.figures.set(of.tensor, of);
      if (figures.some((of) => of.tensor === this.shown)) this.showFigures();
      this.get(".state").textContent = over ? `${this.tensors.length} tensor${this.tensors.length > 1 ? "s" : ""}`
        : `Measured ${this.figures.size} of ${this.tensors.length} tensors …`;
      this.colorMap();
      if (over && !figures.length) return;
      if (!over) await new Promise((done) => setTimeout(done, POLL_MS));
    }
  }

  makeMap() {
    const inside = this.tensors.filter((of) => of.layer >= 0);
    const roles = [...new Set(inside.map((of) => of.role))];
    const layers = [...new Set(inside.map((of) => of.layer))].sort((a, b) => a - b);
    this.buttons = this.tensors.map((_, number) => button("", () => this.show(number)));
    const outside = make("div", { class: "outside" }), grid = make("div", { class: "grid" });
    grid.style.gridTemplateColumns = `auto repeat(${roles.length}, minmax(1.1rem, 4rem))`;
    const at = new Map(this.tensors.map((of, number) => [`${of.layer} ${of.role}`, number]));
    grid.append(make("span"), ...roles.map((role) => make("span", { class: "role" }, role)),
      ...layers.flatMap((layer) => [make("span", { class: "layer" }, layer),
        ...roles.map((role) => this.buttons[at.get(`${layer} ${role}`)] ?? make("span"))]));
    this.tensors.forEach((tensor, number) => {
      // those outside of layers, and others that share a place
      if (tensor.layer < 0 || at.get(`${tensor.layer} ${tensor.role}`) !== number) {
        this.buttons[number].textContent = tensor.name;
        outside.append(this.buttons[number]);
      }
    });
    this.get(".map").append(outside, grid);
    grid.hidden = !layers.length;
    this.colorMap();
  }

  colorMap() {
    const [text, figure] = FIGURES[this.get(".figure").value];
    const values = this.tensors.map((tensor, number) => {
      const of = this.figures.get(number);
      return of ? figure(of, tensor) : null;
    });
    const known = values.filter((value) => value !== null && Number.isFinite(value));
    const most = Math.max(...known), least = Math.min(...known);
    this.tensors.forEach((tensor, number) => {
      const value = values[number], button = this.buttons[number];
      const share = value === null ? 0 : 0.06 + 0.8 * placed(value, least, most);
      const { back, ink } = colorOf(share, 1);
      button.style.background = back;
      button.style.color = ink;
      const measured = this.figures.has(number) ? `no ${text}` : "not measured yet";
      const state = tensor.trouble || (value === null ? measured : `${text} ${short(value)}`);
      button.title = `${tensor.name}: ${tensor.type}, ${tensor.ne.join(" x ")}, ${state}`;
      button.setAttribute("aria-label", button.title);
      button.setAttribute("aria-pressed", number === this.shown);
    });
    this.get(".range").textContent = known.length ? `from ${short(least)}, pale, to ${short(most)}` : "";
  }

  show(number) {
    return this.working(() => this.open(number));
  }

  // Mark the tensor as busy while `action` runs.
  async working(action) {
    const place = this.get(".tensor");
    this.n_working = (this.n_working ?? 0) + 1;
    place.ariaBusy = true;
    await action();
    this.n_working -= 1;
    place.ariaBusy = this.n_working > 0;
  }

  async open(number) {
    this.shown = number;
    const details = await this.json(`tensor/${number}`);
    if (!details || this.shown !== number) return;
    this.details = details;
    const tensor = this.tensors[number], [own] = this.details.matrices;
    this.get(".tensor").hidden = false;
    this.get(".name").textContent = tensor.name;
    const blocks = own.block > 1 ? `, blocks of ${own.block} weights` : "";
    const subs = own.sub_block < own.block ? ` in sub-blocks of ${own.sub_block}` : "";
    this.get(".facts").textContent =
      `${tensor.type}, ${tensor.ne.join(" x ")}, ${count(tensor.bytes)} bytes${blocks}${subs}`;
    this.get(".troubles").textContent = this.details.troubles.join("; ");
    const visible = !tensor.trouble && this.details.rows * this.details.columns > 0;
    this.get(".matrix").hidden = !visible || this.details.rows === 1;
    this.get(".vectors").hidden = !visible || this.details.rows !== 1;
    this.colorMap();
    this.showFigures();
    this.panes.clear();
    this.get(".panes").replaceChildren();
    if (!visible) return;
    if (this.details.rows === 1) await this.showVectors();
    else await this.showMatrix();
  }

  // The matrices of the tensor, in the order in which they are shown: [number, caption].
  matrices() {
    const [own, original] = this.details.matrices;
    const named = (of) => `${of.model} · ${of.type}`;
    if (!original) return [[0, named(own)]];
    return [[1, `original: ${named(original)}`], [0, named(own)], [2, `difference: ${own.type} − ${original.type}`]];
  }

  async showMatrix() {
    const number = this.shown, measure = this.get(".measure").value, all = this.matrices();
    const limits = new Map(await Promise.all(all.map(async ([which]) =>
      [which, await this.json(`limits/${measure}/${number}/${which}`)])));
    if (this.shown !== number || [...limits.values()].includes(null)) return;
    if (limits.has(1)) {
      // both have the same colours
      const both = limits.get(0).map((limit, level) => Math.max(limit, limits.get(1)[level]));
      limits.set(0, both).set(1, both);
    }
    const place = this.get(".panes");
    place.replaceChildren();
    const panes = all.map(([which, caption]) => {
      const canvas = make("canvas", { tabindex: 0, role: "img",
        "aria-label": `${caption}; arrows move, + and - zoom, 0 shows the whole` });
      const figure = place.appendChild(make("figure", {}, make("figcaption", {}, caption), canvas, legend()));
      const of = this.details.matrices[which] ?? this.details.matrices[0];
      return { canvas, which, caption, block: of.block, sub_block: of.sub_block, limits: limits.get(which), figure };
    });
    this.panes.show(panes, this.details);
  }

  async fetchTile(which, level, row, column) {
    const measure = this.get(".measure").value;
    const answer = await this.ask(`tile/${measure}/${this.shown}/${which}/${level}/${row}/${column}`);
    if (!answer) return null;
    const [rows, columns] = answer.headers.get("X-Shape").split(",").map(Number);
    return { cells: new Float32Array(await answer.arrayBuffer()), rows, columns };
  }

  // What is below the panes: the level, the weight that is pointed at or chosen, and its neighbours.
  showCell() {
    const { level, chosen, pointed, panes } = this.panes, size = 2 ** level;
    const measure = this.get(".measure").value;
    const shows = measure === "rms" ? "their root mean square" : "the one with the largest absolute value, with its sign";
    this.get(".level").textContent = level
      ? `A cell covers ${size} × ${size} weights and shows ${shows}.`
      : "Every cell is one weight.";
    for (const pane of panes) label(pane.figure.querySelector(".legend"), pane.limits[level]);
    const whole = chosen?.row != null && chosen?.column != null;
    const at = pointed ?? (whole ? chosen : null);
    this.get(".cell").replaceChildren(...(at ? this.cellText(at, pointed ? level : 0) : []));
    this.get(".near").replaceChildren(...(whole && !level ? [this.near(chosen)] : []));
  }

  cellText({ row, column }, level) {
    const size = 2 ** level, { rows, columns, matrix } = this.details;
    const span = (from, n) => size === 1 ? `${from}`
      : `${Math.floor(from / size) * size} to ${Math.min(Math.floor(from / size) * size + size, n) - 1}`;
    const several = rows > matrix && size === 1 ? `matrix ${Math.floor(row / matrix)}, row ${row % matrix} (` : "";
    const where = `${several}row${size > 1 ? "s" : ""} ${span(row, rows)}${several && ")"}, ` +
      `column${size > 1 ? "s" : ""} ${span(column, columns)}`;
    const parts = [make("span", { class: "where" }, where)];
    for (const { which, caption, block } of this.panes.panes) {
      const shown = this.panes.value(which, row, column, level);
      const inBlock = size === 1 && block > 1 && which !== 2
        ? ` (block ${row * Math.ceil(columns / block) + Math.floor(column / block)}, element ${column % block})` : "";
      const value = make("b", { "data-which": which }, shown === null ? "…" : exact(shown));
      const text = this.panes.panes.length > 1 ? `${caption.split(":")[0]} ` : "";
      parts.push(make("span", {}, text, value, inBlock));
    }
    return parts;
  }

  // A table of the weights around one.
  near(at) {
    const places = (at, n, size) => {
      const from = Math.max(0, Math.min(n - size, at - (size >> 1)));
      return Array.from({ length: Math.min(n, size) }, (_, i) => from + i);
    };
    const columns = places(at.column, this.details.columns, 6);
    const cell = (r, c) => {
      const value = this.panes.value(0, r, c);
      return make("td", { class: r === at.row && c === at.column ? "chosen" : null }, value === null ? "…" : exact(value));
    };
    return make("table", {}, row("th", ["row", ...columns.map((c) => `column ${c}`)]),
      ...places(at.row, this.details.rows, 5).map((r) => row("th", [r, ...columns.map((c) => cell(r, c))])));
  }

  async showVectors() {
    const number = this.shown, place = this.get(".vectors");
    place.replaceChildren();
    for (const [which, caption] of this.matrices()) {
      const answer = await this.ask(`vector/${number}/${which}`);
      if (!answer || this.shown !== number) return;
      const step = Number(answer.headers.get("X-Step"));
      const values = new Float32Array(await answer.arrayBuffer());
      const chart = make("div", { class: "chart" });
      const text = caption + (step > 1 ? `, the largest of each ${step}` : "");
      place.append(make("figure", {}, make("figcaption", {}, text), chart));
      drawLine(chart, values, step);
    }
  }

  showFigures() {
    const of = this.figures.get(this.shown);
    this.get(".about").hidden = !of;
    if (!of) return;
    this.get(".histogram").replaceChildren(...histogram(of, this.tensors[this.shown]));
    this.get(".numbers").replaceChildren(...numbers(of));
    this.get(".channels").replaceChildren(...channelLists(of, (row, column) => this.panes.goTo(row, column)));
  }
}

// Where a value is between two, from 0 to 1; logarithmic if they differ tenfold, as in reports.
function placed(value, least, most) {
  if (most <= least) return 0;
  return least > 0 && most > 10 * least ? Math.log(value / least) / Math.log(most / least)
    : (value - least) / (most - least);
}
