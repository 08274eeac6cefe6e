// The time that is shown: now, or an earlier time while paused; a range of it can be chosen.
//
// All times are seconds of the session. `window.until` is the right edge, null for now.

import { $, count } from "./common.js";
import { chartOverTime, clock, onSideways } from "./draw.js";

const view = { until: null, chosen: null };
let source = null, changed = null;

// Starts. `what()` returns what is shown ({seconds, frame}), `onLook` is called when the user looks
// at another time, which pauses the page.
export function start(what, onLook) {
  source = what;
  changed = onLook;
  $("span").addEventListener("change", () => changed(false));
  $("back").addEventListener("input", () => look(Number($("back").value)));
  onSideways($("charts"), (by) => look(right() + by / 300 * span()));
  $("unchoose").addEventListener("click", () => choose(null));
}

const span = () => Number($("span").value);
const now = () => Math.floor((source().frame?.t ?? 0) / 1e9);
const first = () => source().seconds.values().next().value?.[0] ?? 0;

export const right = () => view.until ?? now();

// Shows the time before `until`; null goes back to now.
export function look(until) {
  const earliest = Math.min(first() + span(), now());
  view.until = until === null ? null : Math.round(Math.min(Math.max(until, earliest), now()));
  if (until === null) choose(null);
  changed(until !== null);
}

function choose(range) {
  view.chosen = range;
  $("chosen").hidden = !range;
  for (const chart of Object.values(charts)) chart.redraw(false);
  if (!range) return;
  $("chosen-range").textContent = range[0] === range[1] ? `second ${clock(range[0])}` : `${clock(range[0])} to ${clock(range[1])}`;
  $("open").href = `perfetto/${range[0]}/${range[1]}`;
}

const charts = {};

function build() {
  const dragged = (from, to) => {
    if (view.until === null) look(now());
    const inside = (second) => Math.min(Math.max(0, second), now());  // the chart may be longer
    choose([inside(Math.floor(from)), inside(Math.ceil(to))]);
  };
  const edges = () => [Math.max(first(), right() - span()), Math.max(right(), first() + 10)];
  const add = (id, series, format) => {
    charts[id] = chartOverTime($(`chart-${id}`), series, format, { edges, range: () => view.chosen, choose: dragged });
  };
  add("rate", [["generated", "#0a7ea4"], ["of prompts", "#8250df"]], count);
  add("cells", [["used", "#1a7f37"]], count);
  add("memory", [["resident", "#bf8700"]], count);
  add("cpu", [["used", "#0a7ea4"], ["waiting for one", "#cf222e"]], (v) => v.toFixed(1));
}

export function drawCharts() {
  if (!charts.rate) build();
  const from = right() - span() - 1, to = Math.min(right(), now() - 1);  // this second is not over
  const shown = [];  // seconds in which nothing happened are zero
  let before = null;
  const quiet = (number) => [number, 0, 0, 0, 0, before[5], before[6], 0, 0];
  const gap = (until) => {
    if (!before || until - before[0] < 2) return;
    shown.push(quiet(Math.max(before[0] + 1, from)), quiet(until - 1));
  };
  for (const second of source().seconds.values()) {
    if (second[0] > to) break;
    if (second[0] >= from) {
      gap(second[0]);
      shown.push(second);
    }
    before = second;
  }
  gap(to + 1);
  const x = shown.map((s) => s[0]), column = (i, by = 1) => shown.map((s) => s[i] / by);
  charts.rate.setData([x, column(1), column(2)]);
  charts.cells.setData([x, column(5)]);
  charts.memory.setData([x, column(6, 2 ** 20)]);
  charts.cpu.setData([x, column(7, 1e9), column(8, 1e9)]);
  const back = $("back");
  back.min = Math.min(first() + span(), now());
  back.max = now();
  back.value = right();
  back.disabled = now() - first() <= span();
  $("shown-time").textContent = view.until === null ? "up to now" : `up to ${clock(right())} of ${clock(now())}`;
}
