// Small parts: elements, numbers as text, colours. Text of a model is only ever a text node.

export const $ = (id) => document.getElementById(id);

// An element with attributes (`text`, `class`, `onclick`, `data-x` …) and children.
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") element.textContent = value;
    else if (key.startsWith("on")) element[key] = value;
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

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
