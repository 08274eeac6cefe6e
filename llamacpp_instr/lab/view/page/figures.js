// The figures of a tensor: histogram, numbers, outliers, a vector's line; and the legend of colours.

import { colorOf } from "./colors.js";
import { button, count, make, makeChart } from "./common.js";
import { exact, short } from "./panes.js";

// The bars of the weights that were sampled, and their axis.
export function histogram({ histogram: { counts, limit }, non_finite: lost }, tensor) {
  const most = Math.log1p(Math.max(...counts));
  const bars = make("div", { class: "bars" }, ...counts.map(() => make("span")));
  counts.forEach((n, i) => {
    bars.children[i].style.height = `${n ? 4 + 96 * Math.log1p(n) / most : 0}%`;
  });
  const sampled = counts.reduce((a, b) => a + b, 0), n = tensor.ne.reduce((a, b) => a * b, 1);
  const sample = sampled < n - lost ? `, ${count(sampled)} weights` : "";
  const marks = [`−${short(limit)}`, `0; heights are logarithmic${sample}`, short(limit)];
  return [bars, make("p", { class: "key axis" }, ...marks.map((mark) => make("span", {}, mark)))];
}

// The rows of a table.
export function numbers(of) {
  const rows = [["mean", of.mean], ["standard deviation", of.std], ["largest |w|", of.largest],
    ...Object.entries(of.percentiles), ["zeros", of.zeros, (share) => `${(100 * share).toFixed(1)} %`],
    ["kurtosis", of.kurtosis], ["norm", of.norm], ["not finite", of.non_finite || null, String]];
  return rows.filter(([, value]) => value !== null).map(([name, value, format]) =>
    make("tr", {}, make("th", {}, name),
      make("td", { "data-figure": name }, (format ?? ((v) => Number(v.toPrecision(5))))(value))));
}

// The outliers; a click on one calls `goTo` with its row or its column, and null.
export function channelLists(of, goTo) {
  const lists = [];
  for (const [side, channels] of [["row", of.row_norms], ["column", of.column_norms]]) {
    if (!channels) continue;
    const n = channels.n_outliers;
    lists.push(make("p", {}, `${count(n)} of ${count(channels.n)} ${side}s` +
      `${n > channels.worst.length ? `, the largest ${channels.worst.length}` : ""}; ` +
      `the median of their norms is ${short(channels.median)}.`));
    lists.push(make("ul", {}, ...channels.worst.map(({ index, times_median: times }) =>
      make("li", {}, button(`${side} ${index}: ${times.toFixed(2)} × the median`,
        () => goTo(side === "row" ? index : null, side === "row" ? null : index))))));
  }
  const rule = "Their norm has a modified z-score above 3.5 (Iglewicz and Hoaglin 1993).";
  return lists.length ? [...lists, make("p", { class: "key" }, rule)] : [make("p", {}, "A vector has none.")];
}

export function legend() {
  const strip = make("span", { class: "strip" }, ...Array.from({ length: 25 }, () => make("i")));
  return make("div", { class: "legend" }, make("span", { class: "least" }), strip, make("span", { class: "most" }));
}

export function label(legend, limit) {
  legend.querySelector(".least").textContent = `≤ −${short(limit)}`;
  legend.querySelector(".most").textContent = `≥ ${short(limit)}`;
  [...legend.querySelectorAll("i")].forEach((cell, i) => {
    cell.style.background = colorOf((i - 12) / 12, 1).back;
  });
}

export function drawLine(place, values, step) {
  makeChart(place, 220, [Float64Array.from(values, (_, i) => i * step), values], {
    scales: { x: { time: false } },
    series: [{ label: "element" }, { label: "weight", stroke: "#4393c3", width: 1, points: { show: false },
      value: (_, value) => value === null ? "" : exact(value) }],
    axes: [{}, { size: 64 }],
  });
}
