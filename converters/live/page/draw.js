// Drawing: heat maps, the latest steps, and charts over time; and numbers as people read them.

import { $, dark, makeChart } from "./common.js";

export function duration(ns) {
  if (ns === null || ns === undefined) return "–";
  const [value, unit] = ns >= 1e9 ? [ns / 1e9, "s"] : ns >= 1e6 ? [ns / 1e6, "ms"] : [ns / 1e3, "µs"];
  return `${value.toPrecision(3)} ${unit}`.replace(/e\+\d+/, "");
}

export const mib = (bytes) => `${(bytes / 2 ** 20).toFixed(bytes < 2 ** 30 ? 1 : 0)} MiB`;

export function put(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export const text = (id, value) => put($(id), value);

// Calls `move(pixels)` when the wheel turns sideways.
export function onSideways(element, move) {
  element.addEventListener("wheel", (event) => {
    const by = event.deltaX || (event.shiftKey ? event.deltaY : 0);
    if (!by) return;
    event.preventDefault();
    move(by);
  }, { passive: false });
}

// 0 to 1 as a colour from the page's background to a strong orange
export function heatColour(share) {
  const light = dark.matches ? 9 + 46 * share : 100 - 48 * share;
  return `hsl(${24 - 14 * share} ${dark.matches ? 10 + 82 * Math.sqrt(share) : 92}% ${light}%)`;
}

// Draws rows (the first is outside of layers) × blocks, on the scale of `known`: logarithmic if that
// differs tenfold, as in reports.
export function drawHeat(canvas, values, known) {
  const positive = known.flat().filter((value) => value > 0);
  const least = Math.min(...positive), most = Math.max(...positive);
  const placed = (value) => most > 10 * least ? Math.log(Math.max(value, least) / least) / Math.log(most / least) : value / most;
  const rows = values.length, columns = values[0].length;
  canvas.width = columns;
  canvas.height = rows;
  canvas.style.height = `${Math.min(420, Math.max(90, rows * 14))}px`;
  const context = canvas.getContext("2d");
  values.forEach((row, y) => row.forEach((value, x) => {
    context.fillStyle = heatColour(value > 0 && positive.length ? Math.min(1, 0.1 + 0.9 * placed(value)) : 0);
    context.fillRect(x, y, 1, 1);
  }));
}

const COLOUR = { prefill: "#8250df", decode: "#0a7ea4", encode: "#bf8700" };
export const STEP_WIDTH = 4;

// Draws `steps`, the latest at the right edge, as bars of their time on a logarithmic scale.
export function drawSteps(canvas, steps, chosen) {
  const width = canvas.clientWidth, height = canvas.clientHeight, scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const shown = steps.slice(-Math.floor(width / STEP_WIDTH));
  const most = Math.max(1, ...shown.map((step) => step[6]));
  const least = Math.min(most / 10, ...shown.map((step) => Math.max(step[6], 1)));
  shown.forEach((step, i) => {
    const share = Math.log(Math.max(step[6], 1) / least * 1.2) / Math.log(most / least * 1.2);
    const x = width - (shown.length - i) * STEP_WIDTH;
    context.fillStyle = step[0] === chosen ? getComputedStyle(canvas).color : COLOUR[step[2]];
    const tall = Math.max(2, share * (height - 4));
    context.fillRect(x, height - tall, STEP_WIDTH - 1, tall);
  });
  return shown;
}

// A chart of columns of `series` over seconds. `edges()` are the first and last second that are
// shown, `range()` those that are marked or null; `choose(from, to)` is called when the user drags.
export function chartOverTime(place, series, format, { edges, range, choose }) {
  const chart = makeChart(place, 150, [[], ...series.map(() => [])], {
    scales: { x: { time: false, range: edges }, y: { range: (_, least, most) => [0, most > 0 ? most * 1.1 : 1] } },
    cursor: { y: false, drag: { x: true, y: false, setScale: false }, sync: { key: "time" } },
    legend: { show: series.length > 1 },
    hooks: {
      setSelect: [({ select: { left, width } }) => {
        if (width > 0) choose(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
      }],
      draw: [(chart) => {
        const [left, right] = (range() ?? [0, 0]).map((second) => chart.valToPos(second, "x"));
        chart.setSelect({ left, width: range() ? right - left : 0, top: 0, height: chart.over.clientHeight }, false);
      }],
    },
    series: [
      { label: "s" },
      ...series.map(([label, colour]) => ({ label, stroke: colour, width: 1.5, points: { show: false } })),
    ],
    axes: [{ values: (_, at) => at.map(clock) }, { size: 58, values: (_, at) => at.map(format) }],
  });
  dark.addEventListener("change", () => chart.redraw());
  return chart;
}

// Seconds of the session, as in 12:07 or 1:02:03.
export function clock(seconds) {
  const s = Math.max(0, Math.round(seconds)), two = (n) => String(n).padStart(2, "0");
  if (s < 60) return `${s} s`;
  return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}
