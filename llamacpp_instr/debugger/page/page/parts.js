// Small parts: elements, numbers as text, colours. Text of a model is only ever a text node.

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

export const number = (value) =>
  value === null ? "–" : Number.isInteger(value) ? value.toLocaleString("en") : `${+value.toPrecision(6)}`;
export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;

// A token as it can be seen: spaces, line ends and emptiness too.
export function visible(text) {
  return text === "" ? "∅" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (s) => "␣".repeat(s.length));
}

export const dark = matchMedia("(prefers-color-scheme: dark)");

// -1 … 1 as a colour: blue, the page's background, orange; they differ for every kind of eyes.
export function signed(share) {
  const strength = Math.min(1, Math.abs(share));
  const light = dark.matches ? 10 + 50 * strength : 98 - 48 * strength;
  return `hsl(${share < 0 ? 214 : 28} ${40 + 50 * strength}% ${light}%)`;
}

// 0 … 1 as a colour from the background to a strong blue, on which the page's ink can be read
export const strength = (share) =>
  dark.matches ? `hsl(214 70% ${11 + 34 * share}%)` : `hsl(214 85% ${98 - 36 * share}%)`;

export const NOT_FINITE = "#d6249f";

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

// The row and column of the cell of a drawn matrix at which an event was; null outside.
export function cellAt(event, cells) {
  const box = event.target.getBoundingClientRect();
  const y = Math.floor(((event.clientY - box.top) / box.height) * cells.length);
  const x = Math.floor(((event.clientX - box.left) / box.width) * (cells[0]?.length ?? 0));
  return cells[y]?.[x] === undefined ? null : [y, x];
}
