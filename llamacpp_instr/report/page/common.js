// What the pages share: elements, numbers, cells on a canvas. Text of a log or model is only ever a text node.

export const $ = (id) => document.getElementById(id);

// An element with attributes (`class`, `onclick`, `data-x` …) and children: elements and texts.
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element[key] = value;
    else if (value !== null) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

export const button = (text, onclick, attributes = {}) => make("button", { type: "button", onclick, ...attributes }, text);

// A row of a table: texts in cells called `tag`, and cells that are elements already.
export const row = (tag, cells, attributes = {}) =>
  make("tr", attributes, ...cells.map((cell) => (cell instanceof Node ? cell : make(tag, {}, cell))));

export const count = (n) => n.toLocaleString("en");
export const number = (value) =>
  value === null ? "–" : Number.isInteger(value) ? count(value) : `${+value.toPrecision(6)}`;
export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

export const dark = matchMedia("(prefers-color-scheme: dark)");

// Sizes a canvas for the screen; returns its context in CSS pixels.
export function prepared(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return context;
}

// Draws the rows of a matrix as cells, in the colours that `colour(value)` gives them.
export function drawCells(canvas, cells, width, height, colour) {
  const context = prepared(canvas, width, height);
  cells.forEach((values, y) => values.forEach((value, x) => {
    const [wide, tall] = [width / values.length, height / cells.length];
    context.fillStyle = colour(value);
    context.fillRect(x * wide, y * tall, wide + 0.5, tall + 0.5);
  }));
}

// The row and column of the cell of a drawn matrix where an event happened; null outside.
export function cellAt(event, cells) {
  const box = event.target.getBoundingClientRect();
  const y = Math.floor(((event.clientY - box.top) / box.height) * cells.length);
  const x = Math.floor(((event.clientX - box.left) / box.width) * (cells[0]?.length ?? 0));
  return cells[y]?.[x] === undefined ? null : [y, x];
}

// A uPlot chart as wide as its place; `options` are those that differ between charts.
export function makeChart(place, height, data, { axes, ...options }) {
  const stroke = () => getComputedStyle(place).color;
  const chart = new uPlot({
    width: place.clientWidth || 300, height,
    axes: axes.map((axis) => ({ stroke, grid: { stroke: "#8883" }, ...axis })),
    ...options,
  }, data, place);
  new ResizeObserver(() => chart.setSize({ width: place.clientWidth, height })).observe(place);
  return chart;
}
