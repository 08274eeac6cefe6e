// A tensor: its figures, a histogram, and a picture that zooms from the whole to single values.

import { $, button, cellAt, dark, drawCells, make, number, prepared, row } from "./common.js";

const ROWS = 64, COLUMNS = 128; // cells of a picture
const FEW = [24, 8]; // rows and columns whose single values are shown as numbers
const ZOOM = 4;
const NOT_FINITE = "#d6249f";
const LABELS = { n: "values", nan: "NaN", inf: "infinite", zero: "zeros", absmax: "largest |x|", std: "deviation" };

// -1 … 1 as a colour: blue, the page's background, orange, which differ for any colour vision.
function signed(share) {
  const strength = Math.min(1, Math.abs(share));
  const light = dark.matches ? 10 + 50 * strength : 98 - 48 * strength;
  return `hsl(${share < 0 ? 214 : 28} ${40 + 50 * strength}% ${light}%)`;
}

// `[3, 0:8]` as a list, for each dimension a number or [begin, end]; null if it is not understood.
function parseSlice(text, shape) {
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
function sliceText(ranges, shape) {
  const items = ranges.map((at, i) => (Array.isArray(at) ? (at[0] === 0 && at[1] === shape[i] ? ":" : `${at[0]}:${at[1]}`) : String(at)));
  while (items.length && items.at(-1) === ":") items.pop();
  return items.length ? `[${items.join(", ")}]` : "";
}

// The dimensions that are not a number, and their sizes.
const freeOf = (ranges) => ranges.flatMap((at, i) => (Array.isArray(at) ? [i] : []));
const sizeOf = ([begin, end]) => end - begin;

// A window of a size that begins at `begin`, or as near to it as a range allows.
function within(begin, size, [low, high]) {
  const at = Math.max(low, Math.min(begin, high - size));
  return [at, at + size];
}

export class TensorView {
  name = null; // of the op's result
  slice = "";
  #seen = null;

  // `onShown` is called when something else is shown
  constructor(connection, onShown) {
    this.connection = connection;
    this.onShown = onShown;
    this.canvas = $("heat");
    this.canvas.addEventListener("mousemove", (event) => this.#hover(event));
    this.canvas.addEventListener("mouseleave", () => { $("heat-caption").textContent = ""; });
    this.canvas.addEventListener("click", (event) => this.#zoomAt(cellAt(event, this.#seen.heatMap.cells)));
    $("slice-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#go($("slice").value);
    });
    for (const id of ["zoom-whole", "whole-again"]) $(id).onclick = () => this.#go("");
    $("zoom-in").onclick = () => {
      const { cells } = this.#seen.heatMap;
      this.#zoomAt([cells.length >> 1, (cells[0]?.length ?? 0) >> 1]);
    };
    $("zoom-out").onclick = () => this.#zoomOut();
    for (const [id, back, step] of [["page-up", 2, -1], ["page-down", 2, 1], ["page-left", 1, -1], ["page-right", 1, 1]])
      $(id).onclick = () => this.#page(back, step);
    new ResizeObserver(() => this.#seen && this.#draw()).observe(this.canvas.parentElement);
    dark.addEventListener("change", () => this.#seen && this.#draw());
  }

  // Look at a tensor at hand, null for the result of the op.
  show(name) {
    [this.name, this.slice] = [name, ""];
    return this.refresh();
  }

  async refresh() {
    const args = { slice: this.slice, rows: ROWS, columns: COLUMNS };
    if (this.name !== null) args.name = this.name;
    const asked = `${this.name} ${this.slice}`;
    let seen = null, problem = "";
    try {
      seen = await this.connection.request("instr/tensor", args);
    } catch (error) {
      problem = error.message;
    }
    if (asked !== `${this.name} ${this.slice}`) return;
    this.#seen = seen;
    $("tensor-body").hidden = !seen;
    $("tensor-problem").textContent = problem;
    $("tensor-name").textContent = seen ? seen.name : this.name ?? "";
    $("tensor-type").textContent = seen ? seen.type.replace("[", " [") : "";
    $("whole-again").hidden = Boolean(seen) || !this.slice;
    this.onShown();
    if (seen) this.#draw();
  }

  #go(slice) {
    this.slice = slice.trim();
    this.refresh();
  }

  // The shape of the whole tensor.
  get #whole() {
    return /\[(.*)\]$/.exec(this.#seen.type)[1].split("×").map(Number);
  }

  #draw() {
    const { figures, histogram, heatMap } = this.#seen;
    $("slice").value = this.slice;
    $("tensor-part").textContent = this.slice ? `of the part ${this.slice}` : "of all values";
    $("figures").replaceChildren(...Object.entries(figures).map(([key, value]) =>
      make("div", { class: (key === "nan" || key === "inf") && value ? "bad" : null },
        make("dt", {}, LABELS[key] ?? key), make("dd", { "data-figure": key, "data-value": String(value) }, number(value)))));
    drawHistogram($("histogram"), histogram);
    this.#drawHeat(heatMap);
    this.#drawValues(heatMap);
  }

  #drawHeat({ cells, rowEdges }) {
    const rows = cells.length, columns = rows ? cells[0].length : 0;
    const width = this.canvas.parentElement.clientWidth;
    const tall = Math.max(8, Math.min(rows * Math.max(4, Math.min(26, width / Math.max(1, columns))), 420));
    // by rank, so that an outlier does not hide the others
    const sizes = cells.flat().filter((value) => value).map(Math.abs).sort((a, b) => a - b), most = sizes.at(-1) ?? 0;
    const rank = new Map(sizes.map((size, i) => [size, (i + 1) / sizes.length]));
    drawCells(this.canvas, cells, width, rows ? tall : 0, (value) =>
      (value === null ? NOT_FINITE : signed(Math.sign(value) * (rank.get(Math.abs(value)) ?? 0))));
    const entries = { low: `−${number(most)}`, none: "0", high: number(most), bad: "NaN or infinite" };
    $("heat-legend").replaceChildren(...Object.entries(entries).map(([kind, text]) => make("span", {}, make("i", { class: kind }), text)));
    this.canvas.setAttribute("aria-label", `${rowEdges.at(-1)} rows, ${columns} columns of cells`);
  }

  // The single values, if there are few; a click takes one as the slice to change.
  #drawValues({ cells, rowEdges, columnEdges }) {
    const single = rowEdges.at(-1) === cells.length && columnEdges.at(-1) === (cells[0]?.length ?? 0);
    const few = single && cells.length <= FEW[0] && columnEdges.at(-1) <= FEW[1];
    $("values-hint").hidden = few;
    $("values").replaceChildren();
    if (!few) return;
    const cell = (value, y, x) => {
      const place = `[${this.#index(y, x).join(", ")}]`;
      return make("td", {}, button(value === null ? "NaN/∞" : number(value), () => this.#go(place),
        { "data-value": String(value), title: `take ${place} as the part to change` }));
    };
    $("values").append(row("th", ["", ...cells[0].map((_, x) => this.#index(0, x).at(-1))]),
      ...cells.map((values, y) => row("th", [this.#index(y, 0).slice(0, -1).join(", "), ...values.map((one, x) => cell(one, y, x))])));
  }

  // The index, in the whole tensor, of a row and a column of the shown part.
  #index(row, column) {
    const ranges = parseSlice(this.slice, this.#whole) ?? this.#whole.map((n) => [0, n]);
    const free = freeOf(ranges);
    const found = ranges.map((at) => (Array.isArray(at) ? at[0] : at));
    let left = row;
    for (const i of free.slice(0, -1).reverse()) {
      const n = sizeOf(ranges[i]);
      found[i] += left % n;
      left = Math.floor(left / n);
    }
    if (free.length) found[free.at(-1)] += column;
    return found;
  }

  #hover(event) {
    const at = this.#seen && cellAt(event, this.#seen.heatMap.cells);
    if (!at) return;
    const { cells, rowEdges, columnEdges } = this.#seen.heatMap;
    const [y, x] = at, value = cells[y][x];
    const first = this.#index(rowEdges[y], columnEdges[x]);
    const last = this.#index(rowEdges[y + 1] - 1, columnEdges[x + 1] - 1);
    const where = first.map((from, i) => (from === last[i] ? from : `${from}…${last[i]}`)).join(", ");
    const many = first.some((from, i) => from !== last[i]);
    const shown = value === null ? "NaN or infinite" : number(value);
    $("heat-caption").textContent = many ? `[${where}]: furthest from zero is ${shown}` : `[${where}] = ${shown}`;
  }

  // Shows what `change(ranges, free)` makes of the shown part.
  #change(change) {
    const ranges = parseSlice(this.slice, this.#whole);
    if (!ranges) return;
    change(ranges, freeOf(ranges));
    this.#go(sliceText(ranges, this.#whole));
  }

  // A window around a cell, a quarter as wide and tall; other dimensions become numbers.
  #zoomAt(at) {
    if (!at) return;
    const { rowEdges, columnEdges } = this.#seen.heatMap;
    const middle = this.#index(rowEdges[at[0]], columnEdges[at[1]]);
    this.#change((ranges, free) => {
      for (const i of free.slice(0, -2)) ranges[i] = middle[i];
      free.slice(-2).reverse().forEach((i, k) => { // columns first
        const n = sizeOf(ranges[i]);
        const size = Math.min(n, Math.max(FEW[1 - k], Math.ceil(n / ZOOM)));
        ranges[i] = within(middle[i] - (size >> 1), size, ranges[i]);
      });
    });
  }

  // Four times as wide and tall.
  #zoomOut() {
    this.#change((ranges) => ranges.forEach((range, i) => {
      const [begin, end] = Array.isArray(range) ? range : [range, range + 1];
      const more = Math.ceil(((end - begin) * (ZOOM - 1)) / 2);
      ranges[i] = [Math.max(0, begin - more), Math.min(this.#whole[i], end + more)];
    }));
  }

  // The previous or next window, along the last dimension that is shown (`back` 1) or the one before.
  #page(back, step) {
    this.#change((ranges, free) => {
      const i = free.at(-back);
      if (i === undefined) return;
      const size = sizeOf(ranges[i]);
      ranges[i] = within(ranges[i][0] + step * size, size, [0, this.#whole[i]]);
    });
  }
}

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
