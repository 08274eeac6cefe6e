// Colours of numbers: blue below zero, orange above, the page's background at zero, which people with
// red-green blindness can tell apart. Numbers that are not finite are magenta.

import { dark } from "./common.js";

const STOPS = {
  light: { zero: [255, 255, 255], below: [[146, 197, 222], [33, 102, 172], [5, 38, 80]],
    above: [[253, 184, 99], [214, 107, 0], [105, 45, 5]] },
  dark: { zero: [22, 22, 22], below: [[20, 70, 125], [60, 140, 200], [190, 225, 245]],
    above: [[130, 65, 5], [224, 130, 20], [254, 226, 188]] },
};
const STEPS = 255;
const NOT_FINITE = [230, 0, 230];

let table = makeTable();

function makeTable() {
  const { zero, below, above } = STOPS[dark.matches ? "dark" : "light"];
  const colors = new Uint32Array(2 * STEPS + 2);
  for (let i = -STEPS; i <= STEPS; i++) {
    colors[i + STEPS] = packed(mixed([zero, ...(i < 0 ? below : above)], Math.abs(i) / STEPS));
  }
  colors[2 * STEPS + 1] = packed(NOT_FINITE);
  return colors;
}

function mixed(stops, share) {
  const at = share * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2);
  return stops[i].map((from, k) => Math.round(from + (stops[i + 1][k] - from) * (at - i)));
}

function packed([r, g, b]) {
  return (255 << 24 | b << 16 | g << 8 | r) >>> 0;
}

// The colour of a number, as an index of the table; `limit` is where colours end.
function indexOf(value, limit) {
  if (!Number.isFinite(value)) return 2 * STEPS + 1;
  return Math.round(Math.max(-1, Math.min(1, value / limit)) * STEPS) + STEPS;
}

// Draws cells, in rows, as a canvas with a pixel for each.
export function paint(cells, rows, columns, limit) {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < cells.length; i++) pixels[i] = table[indexOf(cells[i], limit)];
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// The CSS colour of a number, and of text on it.
export function colorOf(value, limit) {
  const color = table[indexOf(value, limit)];
  const rgb = [color & 255, color >> 8 & 255, color >> 16 & 255];
  const light = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2];
  return { back: `rgb(${rgb})`, ink: light > 140 ? "#000" : "#fff" };
}

// `changed` is called after the browser changed between light and dark.
export function onTheme(changed) {
  dark.addEventListener("change", () => {
    table = makeTable();
    changed();
  });
}
