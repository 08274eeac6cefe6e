// What the model has in mind at a stop: the logit lens, attention, the next token.

import { $, cellAt, dark, drawCells, make, percent, row } from "./common.js";

// A token made visible, including spaces, line ends and an empty one.
function visible(text) {
  return text === "" ? "∅" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +| +$/g, (s) => "␣".repeat(s.length));
}

// Layers × most probable tokens, coloured by probability.
export function drawLens(layers) {
  const best = Math.max(0, ...layers.map(({ best }) => best.length));
  const heads = Array.from({ length: best }, (_, i) => (i ? `${i + 1}.` : "most probable"));
  const rows = layers.map(({ layer, best }) =>
    row("td", [make("th", { scope: "row" }, layer), ...best.map(guess)], { "data-layer": layer }));
  $("lens").replaceChildren(row("th", ["after layer", ...heads]), ...rows.reverse());
}

function guess([token, text, share]) {
  const cell = make("td", { title: `token ${token}, probability ${share}`, "data-token": token, "data-share": share },
    make("b", {}, visible(text)), make("span", {}, percent(share)));
  cell.style.setProperty("--share", `${100 * Math.sqrt(share)}%`);
  return cell;
}

export function drawNext(best) {
  $("next").replaceChildren(...best.map(([token, text, share]) => {
    const bar = make("i");
    bar.style.width = `${100 * share}%`;
    return make("li", { "data-token": token, "data-share": share, title: `token ${token}, probability ${share}` },
      make("b", {}, visible(text)), make("span", { class: "bar" }, bar), make("span", {}, percent(share)));
  }));
}

// The tokens so far, those of this compute marked; a cell of the KV cache each, where it is known.
export function drawTokens({ tokens, cells }) {
  const now = new Set(tokens.map(([, position]) => position));
  const shown = cells.length ? cells : tokens;
  const what = cells.length ? "cell" : "number";
  $("tokens").replaceChildren(...shown.map(([at, position, token, text]) => make("span", {
    class: now.has(position) ? "now" : null, "data-token": token,
    title: `${what} ${at}, position ${position}, token ${token}` }, text.replace(/\n/g, "↵\n") || "∅")));
}

// A picture for each head, or of the chosen one with the tokens on its sides.
export function drawAttention(seen, chosen, choose) {
  const of = seen.computed ? "computed from queries and keys, because flash attention does not store it" : "the soft-max node's own values";
  $("attention-caption").textContent = `Layer ${seen.layer}: ${of}.`;
  $("heads").replaceChildren(...seen.maps.map(({ head }) =>
    make("button", { type: "button", class: "head", "aria-pressed": head === chosen, "data-head": head, onclick: () => choose(head) },
      make("canvas"), make("span", {}, `head ${head}`))));
  $("heads").querySelectorAll("canvas").forEach((canvas, i) =>
    drawCells(canvas, seen.maps[i].values, canvas.clientWidth || 90, 70, shade));
}

export function drawHead(seen) {
  const [map] = seen.maps;
  const canvas = $("head");
  const rows = map.values.length, columns = rows ? map.values[0].length : 0;
  const width = canvas.parentElement.clientWidth;
  const height = Math.min(420, Math.max(24, rows * 18));
  drawCells(canvas, map.values, width, height, shade);
  const labels = (texts, edges) => edges.slice(0, -1).map((at) => texts[at]);
  const rowTexts = labels(seen.rows, map.rowEdges), columnTexts = labels(seen.cells, map.columnEdges);
  side($("head-rows"), rowTexts, height / Math.max(1, rows) >= 12);
  side($("head-columns"), columnTexts, width / Math.max(1, columns) >= 15);
  canvas.onmousemove = (event) => {
    const at = cellAt(event, map.values);
    if (!at) return;
    const [y, x] = at, token = map.rowEdges[y], cell = map.columnEdges[x];
    const named = (text) => (text === null ? "" : ` ${JSON.stringify(text)}`);
    $("head-caption").textContent =
      `token ${token}${named(seen.rows[token])} gives ${percent(map.values[y][x])} to cell ${cell}${named(seen.cells[cell])}`;
  };
  // the rows as numbers, for those who cannot see the picture, or want to copy them
  const most = (map.values.at(-1) ?? []).map((value, x) => [value, map.columnEdges[x]])
    .filter(([value]) => value >= 0.0005).sort((a, b) => b[0] - a[0]).slice(0, 5);
  $("head-values").replaceChildren(...most.map(([value, cell]) => make("li", { "data-value": value },
    `${percent(value)} to ${seen.cells[cell] === null ? `cell ${cell}` : visible(seen.cells[cell])}`)));
}

// 0 … 1 as a colour from the background to a strong blue, on which the page's ink can be read
const strength = (share) =>
  dark.matches ? `hsl(214 70% ${11 + 34 * share}%)` : `hsl(214 85% ${98 - 36 * share}%)`;
const shade = (value) => strength(Math.sqrt(value));

function side(box, texts, fits) {
  box.replaceChildren(...(fits ? texts.map((text) => make("span", { title: text ?? "" }, text === null ? "·" : visible(text))) : []));
}

export function drawComparison({ firstDifference, steps }) {
  $("comparison-caption").textContent = firstDifference === null
    ? "The text did not change."
    : `Token ${firstDifference + 1} is the first that differs.`;
  const text = (value) => (value === null ? "" : visible(value));
  const figure = (value) => (value === null ? "" : value.toPrecision(3));
  const heads = ["token", "unchanged", "changed", "logits differ by", "KL divergence, nats"];
  $("compared").replaceChildren(
    row("th", heads),
    ...steps.map(({ number, before, after, logitsBy, divergence }) =>
      row("td", [number + 1, text(before), text(after), figure(logitsBy), figure(divergence)],
        { class: before === after ? null : "differs" })));
}
