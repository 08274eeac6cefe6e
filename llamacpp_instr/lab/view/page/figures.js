// The figures of a tensor: histogram, numbers, outliers, a vector's line; and small parts of the page.

import { colorOf } from "./colors.js";
import { exact, short } from "./panes.js";

// The bars of the weights that were sampled, and their axis.
export function histogram({ histogram: { counts, limit }, non_finite: lost }, tensor) {
  const most = Math.log1p(Math.max(...counts));
  const bars = element("div", "", "bars");
  for (const count of counts) {
    const bar = element("span", "");
    bar.style.height = `${count ? 4 + 96 * Math.log1p(count) / most : 0}%`;
    bars.append(bar);
  }
  const sampled = counts.reduce((a, b) => a + b, 0), n = tensor.ne.reduce((a, b) => a * b, 1);
  const sample = sampled < n - lost ? `, ${sampled.toLocaleString("en")} weights` : "";
  const axis = element("p", "", "key axis");
  axis.append(element("span", `−${short(limit)}`), element("span", `0; heights are logarithmic${sample}`),
    element("span", short(limit)));
  return [bars, axis];
}

// The rows of a table.
export function numbers(of) {
  const rows = [["mean", of.mean], ["standard deviation", of.std], ["largest |w|", of.largest],
    ...Object.entries(of.percentiles), ["zeros", of.zeros, (share) => `${(100 * share).toFixed(1)} %`],
    ["kurtosis", of.kurtosis], ["norm", of.norm], ["not finite", of.non_finite || null, String]];
  return rows.filter(([, value]) => value !== null).map(([name, value, format]) => {
    const line = element("tr", "");
    const cell = element("td", (format ?? ((v) => Number(v.toPrecision(5))))(value));
    cell.dataset.figure = name;
    line.append(element("th", name), cell);
    return line;
  });
}

// The outliers; a click on one calls `goTo` with its row or its column, and null.
export function channelLists(of, goTo) {
  const lists = [];
  for (const [side, channels] of [["row", of.row_norms], ["column", of.column_norms]]) {
    if (!channels) continue;
    const n = channels.n_outliers;
    lists.push(element("p", `${n.toLocaleString("en")} of ${channels.n.toLocaleString("en")} ${side}s` +
      `${n > channels.worst.length ? `, the largest ${channels.worst.length}` : ""}; ` +
      `the median of their norms is ${short(channels.median)}.`));
    const list = element("ul", "");
    for (const worst of channels.worst) {
      const button = element("button", `${side} ${worst.index}: ${worst.times_median.toFixed(2)} × the median`);
      button.type = "button";
      button.onclick = () => goTo(side === "row" ? worst.index : null, side === "row" ? null : worst.index);
      const item = element("li", "");
      item.append(button);
      list.append(item);
    }
    lists.push(list);
  }
  const rule = "Their norm has a modified z-score above 3.5 (Iglewicz and Hoaglin 1993).";
  return lists.length ? [...lists, element("p", rule, "key")] : [element("p", "A vector has none.")];
}

export function element(tag, text, className = "") {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  if (className) made.className = className;
  return made;
}

export function legend() {
  const made = element("div", "", "legend");
  const strip = element("span", "", "strip");
  for (let i = -12; i <= 12; i++) strip.append(element("i", ""));
  made.append(element("span", "", "least"), strip, element("span", "", "most"));
  return made;
}

export function label(legend, limit) {
  legend.querySelector(".least").textContent = `≤ −${short(limit)}`;
  legend.querySelector(".most").textContent = `≥ ${short(limit)}`;
  [...legend.querySelectorAll("i")].forEach((cell, i) => {
    cell.style.background = colorOf((i - 12) / 12, 1).back;
  });
}

export function drawLine(place, values, step) {
  const ink = () => getComputedStyle(place).color;
  const x = Float64Array.from(values, (_, i) => i * step);
  const axis = { stroke: ink, grid: { stroke: "#8883" } };
  const options = {
    width: place.clientWidth || 300, height: 220, scales: { x: { time: false } },
    series: [{ label: "element" }, { label: "weight", stroke: "#4393c3", width: 1, points: { show: false },
      value: (_, value) => value === null ? "" : exact(value) }],
    axes: [axis, { ...axis, size: 64 }],
  };
  const chart = new uPlot(options, [x, values], place);
  new ResizeObserver(() => chart.setSize({ width: place.clientWidth, height: 220 })).observe(place);
}
