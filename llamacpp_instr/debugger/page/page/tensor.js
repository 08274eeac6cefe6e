// A tensor: its figures, a histogram, and a picture that zooms from the whole to single values.

import { $, dark, make, number, prepared, signed, NOT_FINITE } from "./parts.js";

const ROWS = 64, COLUMNS = 128; // cells of a picture
const FEW = [24, 8]; // rows and columns whose single values are shown as numbers
const ZOOM = 4;

// `[3, 0:8]` as a list, for each dimension a number or [begin, end]; null if it is not understood.
export function parseSlice(text, shape) {
  const inner = text.trim().replace(/^\[|\]$/g, "").trim();
  const items = inner ? inner.split(",").map((item) => item.trim()) : [];
  if (items.length > shape.length) return null;
  const found = items.map((item, i) => {
    const n = shape[i];
    const at = (digits, none) => (digits === undefined || digits === "" ? none : +digits < 0 ? +digits + n : Math.min(+digits, n));
    if (/^-?\d+$/.test(item)) return at(item);
    const range = /^(-?\d+)?:(-?\d+)?$/.exec(item);
    return range ? [at(range[1], 0), at(range[2], n)] : null;
  });
  return found.includes(null) ? null : [...found, ...shape.slice(items.length).map((n) => [0, n])];
}

// The text of such a list; what selects everything has none.
export function sliceText(ranges, shape) {
  const items = ranges.map((at, i) => (Array.isArray(at) ? (at[0] === 0 && at[1] === shape[i] ? ":" : `${at[0]}:${at[1]}`) : String(at)));
  while (items.length && items.at(-1) === ":") items.pop();
  return items.length ? `[${items.join(", ")}]` : "";
}

export class TensorView {
  name = null; // of the op's result
  slice = "";
  #seen = null;
  #whole = [];

  // `onShown` is called when something else is shown
  constructor(connection, onShown) {
    this.connection = connection;
    this.onShown = onShown;
    this.canvas = $("heat");
    this.canvas.addEventListener("mousemove", (event) => this.#hover(event));
    this.canvas.addEventListener("mouseleave", () => { $("heat-caption").textContent = ""; });
    this.canvas.addEventListener("click", (event) => this.#zoomAt(this.#cell(event)));
    $("slice-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#go($("slice").value);
    });
    for (const id of ["zoom-whole", "whole-again"]) $(id).onclick = () => this.#go("");
    $("zoom-in").onclick = () => this.#zoomAt(this.#middle());
    $("zoom-out").onclick = () => this.#resize();
    for (const [id, down, right] of [["page-up", -1, 0], ["page-down", 1, 0], ["page-left", 0, -1], ["page-right", 0, 1]])
      $(id).onclick = () => this.#page(down, right);
    new ResizeObserver(() => this.#seen && this.#draw()).observe(this.canvas.parentElement);
    dark.addEventListener("change", () => this.#seen && this.#draw());
  }

  // Look at a tensor at hand, null for the result of the op.
  async show(name, slice = "") {
    [this.name, this.slice] = [name, slice];
    await this.refresh();
  }

  async refresh() {
    const args = { slice: this.slice, rows: ROWS, columns: COLUMNS };
    if (this.name !== null) args.name = this.name;
    const asked = `${this.name} ${this.slice}`;
    try {
      const seen = await this.connection.request("instr/tensor", args);
      if (asked !== `${this.name} ${this.slice}`) return;
      this.#seen = seen;
      this.#whole = /\[(.*)\]$/.exec(seen.type)[1].split("×").map(Number);
      $("tensor-problem").textContent = "";
      $("whole-again").hidden = true;
      $("tensor-body").hidden = false;
    } catch (error) {
      this.#seen = null;
      $("tensor-body").hidden = true;
      $("tensor-name").textContent = this.name ?? "";
      $("tensor-type").textContent = "";
      $("tensor-problem").textContent = error.message;
      $("whole-again").hidden = !this.slice;
      return;
    } finally {
      this.onShown();
    }
    this.#draw();
  }

  // What a change of the shown part names.
  get place() {
    return { name: this.name, slice: this.slice };
  }

  async #go(slice) {
    this.slice = slice.trim();
    await this.refresh();
  }

  #draw() {
    const { name, type, figures, histogram, heatMap } = this.#seen;
    $("tensor-name").textContent = name;
    $("tensor-type").textContent = type.replace("[", " [");
    $("slice").value = this.slice;
    $("tensor-part").textContent = this.slice ? `of the part ${this.slice}` : "of all values";
    const bad = figures.nan + figures.inf;
    $("figures").replaceChildren(...Object.entries(figures).map(([key, value]) =>
      make("div", { class: bad && (key === "nan" || key === "inf") && value ? "bad" : null },
        make("dt", { text: LABELS[key] ?? key }), make("dd", { text: number(value), "data-figure": key, "data-value": String(value) }))));
    drawHistogram($("histogram"), histogram);
    this.#drawHeat(heatMap);
    this.#drawValues(heatMap);
  }

  #drawHeat({ cells, rowEdges }) {
    const rows = cells.length, columns = rows ? cells[0].length : 0;
    const width = this.canvas.parentElement.clientWidth;
    const tall = Math.max(8, Math.min(rows * Math.max(4, Math.min(26, width / Math.max(1, columns))), 420));
    const context = prepared(this.canvas, width, rows ? tall : 0);
    // by rank, so that an outlier does not hide the others
    const sizes = cells.flat().filter((value) => value).map(Math.abs).sort((a, b) => a - b), most = sizes.at(-1) ?? 0;
    const rank = new Map(sizes.map((size, i) => [size, (i + 1) / sizes.length]));
    cells.forEach((row, y) => row.forEach((value, x) => {
      const [left, top] = [(x * width) / columns, (y * tall) / rows];
      context.fillStyle = value === null ? NOT_FINITE : signed(Math.sign(value) * (rank.get(Math.abs(value)) ?? 0));
      context.fillRect(left, top, width / columns + 0.5, tall / rows + 0.5);
    }));
    const entries = { low: `−${number(most)}`, none: "0", high: number(most), bad: "NaN or infinite" };
    $("heat-legend").replaceChildren(...Object.entries(entries).map(([kind, text]) =>
      make("span", {}, make("i", { class: kind }), text)));
    this.canvas.setAttribute("aria-label", `${rowEdges.at(-1)} rows, ${columns} columns of cells`);
  }

  // The single values, if there are few; a click takes one as the slice to change.
  #drawValues({ cells, rowEdges, columnEdges }) {
    const table = $("values");
    const single = rowEdges.at(-1) === cells.length && columnEdges.at(-1) === (cells[0]?.length ?? 0);
    if (!single || cells.length > FEW[0] || columnEdges.at(-1) > FEW[1]) {
      table.replaceChildren();
      $("values-hint").hidden = false;
      return;
    }
    $("values-hint").hidden = true;
    const head = make("tr", {}, make("th"), ...cells[0].map((_, x) => make("th", { text: String(this.#names(0, x).at(-1)) })));
    table.replaceChildren(head, ...cells.map((row, y) => make("tr", {}, make("th", { text: this.#names(y, 0).slice(0, -1).join(", ") }),
      ...row.map((value, x) => make("td", {}, make("button", { type: "button", "data-value": String(value),
        text: value === null ? "NaN/∞" : number(value), title: `take [${this.#names(y, x).join(", ")}] as the part to change`,
        onclick: () => this.#go(`[${this.#names(y, x).join(", ")}]`) }))))));
  }

  // The indexes, in the whole tensor, of a row and a column of the shown part.
  #names(row, column) {
    const ranges = parseSlice(this.slice, this.#whole) ?? this.#whole.map((n) => [0, n]);
    const free = ranges.map((at, i) => (Array.isArray(at) ? i : -1)).filter((i) => i >= 0);
    const found = ranges.map((at) => (Array.isArray(at) ? at[0] : at));
    let left = row;
    free.slice(0, -1).reverse().forEach((i) => {
      const n = ranges[i][1] - ranges[i][0];
      found[i] += left % n;
      left = Math.floor(left / n);
    });
    if (free.length) found[free.at(-1)] += column;
    return found;
  }

  #cell(event) {
    const { cells } = this.#seen.heatMap;
    const box = this.canvas.getBoundingClientRect();
    const y = Math.floor(((event.clientY - box.top) / box.height) * cells.length);
    const x = Math.floor(((event.clientX - box.left) / box.width) * (cells[0]?.length ?? 0));
    return cells[y]?.[x] === undefined ? null : [y, x];
  }

  #middle() {
    const { cells } = this.#seen.heatMap;
    return [cells.length >> 1, (cells[0]?.length ?? 0) >> 1];
  }

  #hover(event) {
    const at = this.#seen && this.#cell(event);
    if (!at) return;
    const { cells, rowEdges, columnEdges } = this.#seen.heatMap;
    const [y, x] = at, value = cells[y][x];
    const first = this.#names(rowEdges[y], columnEdges[x]);
    const last = this.#names(rowEdges[y + 1] - 1, columnEdges[x + 1] - 1);
    const where = first.map((from, i) => (from === last[i] ? from : `${from}…${last[i]}`)).join(", ");
    const many = first.some((from, i) => from !== last[i]);
    const shown = value === null ? "NaN or infinite" : number(value);
    $("heat-caption").textContent = many ? `[${where}]: furthest from zero is ${shown}` : `[${where}] = ${shown}`;
  }

  // A window around a cell, a quarter as wide and tall; other dimensions become numbers.
  #zoomAt(at) {
    if (!at) return;
    const { rowEdges, columnEdges } = this.#seen.heatMap;
    const middle = this.#names(rowEdges[at[0]], columnEdges[at[1]]);
    const ranges = parseSlice(this.slice, this.#whole);
    if (!ranges) return;
    const free = ranges.map((range, i) => (Array.isArray(range) ? i : -1)).filter((i) => i >= 0);
    free.slice(0, -2).forEach((i) => { ranges[i] = middle[i]; });
    const smallest = [FEW[1], FEW[0]]; // columns first
    free.slice(-2).reverse().forEach((i, k) => {
      const n = ranges[i][1] - ranges[i][0];
      const size = Math.min(n, Math.max(smallest[k], Math.ceil(n / ZOOM)));
      const begin = Math.max(ranges[i][0], Math.min(middle[i] - (size >> 1), ranges[i][1] - size));
      ranges[i] = [begin, begin + size];
    });
    this.#go(sliceText(ranges, this.#whole));
  }

  // Four times as wide and tall.
  #resize() {
    const ranges = parseSlice(this.slice, this.#whole);
    if (!ranges) return;
    const grown = ranges.map((range, i) => {
      const [begin, end] = Array.isArray(range) ? range : [range, range + 1];
      const more = Math.ceil(((end - begin) * (ZOOM - 1)) / 2);
      return [Math.max(0, begin - more), Math.min(this.#whole[i], end + more)];
    });
    this.#go(sliceText(grown, this.#whole));
  }

  #page(down, right) {
    const ranges = parseSlice(this.slice, this.#whole);
    if (!ranges) return;
    const free = ranges.map((range, i) => (Array.isArray(range) ? i : -1)).filter((i) => i >= 0);
    for (const [i, step] of [[free.at(-1), right], [free.at(-2), down]]) {
      if (i === undefined || !step) continue;
      const size = ranges[i][1] - ranges[i][0];
      const begin = Math.max(0, Math.min(ranges[i][0] + step * size, this.#whole[i] - size));
      ranges[i] = [begin, begin + size];
    }
    this.#go(sliceText(ranges, this.#whole));
  }
}

const LABELS = { n: "values", nan: "NaN", inf: "infinite", zero: "zeros", absmax: "largest size", std: "deviation" };

function drawHistogram(canvas, { edges, counts }) {
  const width = canvas.parentElement.clientWidth, height = 70;
  const context = prepared(canvas, width, height);
  const most = Math.max(1, ...counts);
  context.fillStyle = getComputedStyle(canvas).color;
  counts.forEach((count, i) => {
    const tall = count ? Math.max(2, (Math.log1p(count) / Math.log1p(most)) * (height - 4)) : 0;
    context.fillRect((i * width) / counts.length + 0.5, height - tall, width / counts.length - 1, tall);
  });
  $("histogram-low").textContent = counts.some(Boolean) ? number(edges[0]) : "";
  $("histogram-high").textContent = counts.some(Boolean) ? number(edges.at(-1)) : "no finite value";
  canvas.setAttribute("aria-label", `histogram from ${edges[0]} to ${edges.at(-1)}`);
}
