// Numbers as people read them, and where they go.

export const $ = (id) => document.getElementById(id);

export function duration(ns) {
  if (ns === null || ns === undefined) return "–";
  const [value, unit] = ns >= 1e9 ? [ns / 1e9, "s"] : ns >= 1e6 ? [ns / 1e6, "ms"] : [ns / 1e3, "µs"];
  return `${value.toPrecision(3)} ${unit}`.replace(/e\+\d+/, "");
}

export const count = (n) => n.toLocaleString("en");
export const mib = (bytes) => `${(bytes / 2 ** 20).toFixed(bytes < 2 ** 30 ? 1 : 0)} MiB`;
export const middle = (values) => values.length ? values.sort((a, b) => a - b)[values.length >> 1] : null;

export const make = (tag, textContent, title = "") => Object.assign(document.createElement(tag), { textContent, title });

// The rows of a table; the first has the headings.
export const tableRows = (rows) => rows.map((cells, i) => {
  const row = document.createElement("tr");
  row.append(...cells.map((cell) => make(i ? "td" : "th", cell)));
  return row;
});

// Calls `move(pixels)` when the wheel turns sideways.
export function onSideways(element, move) {
  element.addEventListener("wheel", (event) => {
    const by = event.deltaX || (event.shiftKey ? event.deltaY : 0);
    if (!by) return;
    event.preventDefault();
    move(by);
  }, { passive: false });
}

export function put(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export const text = (id, value) => put($(id), value);
