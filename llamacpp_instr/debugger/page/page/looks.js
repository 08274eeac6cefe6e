// What the model has in mind at a stop: the logit lens, attention, the next token.

import { $, make, percent, prepared, strength, visible } from "./parts.js";

// Layers × most probable tokens, coloured by probability.
export function drawLens(layers) {
  const best = Math.max(0, ...layers.map(({ best }) => best.length));
  const head = make("tr", {}, make("th", { text: "after layer" }),
    ...Array.from({ length: best }, (_, i) => make("th", { text: i ? `${i + 1}.` : "most probable" })));
  const rows = layers.map(({ layer, best }) => make("tr", { "data-layer": layer },
    make("th", { scope: "row", text: String(layer) }), ...best.map(guess)));
  $("lens").replaceChildren(head, ...rows.reverse());
}

function guess([token, text, share]) {
  const cell = make("td", { title: `token ${token}, probability ${share}`, "data-token": token, "data-share": share },
    make("b", { text: visible(text) }), make("span", { text: percent(share) }));
  cell.style.setProperty("--share", `${100 * Math.sqrt(share)}%`);
  return cell;
}

export function drawNext(best) {
  $("next").replaceChildren(...best.map(([token, text, share]) => {
    const bar = make("i");
    bar.style.width = `${100 * share}%`;
    return make("li", { "data-token": token, "data-share": share, title: `token ${token}, probability ${share}` },
      make("b", { text: visible(text) }), make("span", { class: "bar" }, bar), make("span", { text: percent(share) }));
  }));
}

// The tokens so far, those of this compute marked; a cell of the KV cache each, where it is known.
export function drawTokens({ tokens, cells }) {
  const now = new Set(tokens.map(([, position]) => position));
  const shown = cells.length ? cells : tokens;
  const what = cells.length ? "cell" : "number";
  $("tokens").replaceChildren(...shown.map(([at, position, token, text]) => make("span", {
    class: now.has(position) ? "now" : null, text: text.replace(/\n/g, "↵\n") || "∅", "data-token": token,
    title: `${what} ${at}, position ${position}, token ${token}` })));
}

// A picture for each head, or of the chosen one with the tokens on its sides.
export function drawAttention(seen, chosen, choose) {
  const of = seen.computed ? "computed from queries and keys, because flash attention does not store it" : "the soft-max node's own values";
  $("attention-caption").textContent = `Layer ${seen.layer}: ${of}.`;
  const heads = seen.maps.map((map) => {
    const canvas = make("canvas");
    const box = make("button", { type: "button", class: "head", "aria-pressed": String(map.head === chosen),
      "data-head": map.head, onclick: () => choose(map.head) }, canvas, make("span", { text: `head ${map.head}` }));
    return [box, canvas, map];
  });
  $("heads").replaceChildren(...heads.map(([box]) => box));
  for (const [, canvas, map] of heads) draw(canvas, map.values, canvas.clientWidth || 90, 70);
}

export function drawHead(seen) {
  const [map] = seen.maps;
  const canvas = $("head");
  const rows = map.values.length, columns = rows ? map.values[0].length : 0;
  const width = canvas.parentElement.clientWidth;
  const height = Math.min(420, Math.max(24, rows * 18));
  draw(canvas, map.values, width, height);
  const labels = (texts, edges) => edges.slice(0, -1).map((at) => texts[at]);
  const rowTexts = labels(seen.rows, map.rowEdges), columnTexts = labels(seen.cells, map.columnEdges);
  side($("head-rows"), rowTexts, height / Math.max(1, rows) >= 12);
  side($("head-columns"), columnTexts, width / Math.max(1, columns) >= 15);
  canvas.onmousemove = (event) => {
    const box = canvas.getBoundingClientRect();
    const y = Math.floor(((event.clientY - box.top) / box.height) * rows);
    const x = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const value = map.values[y]?.[x];
    if (value === undefined) return;
    const [row, cell] = [map.rowEdges[y], map.columnEdges[x]];
    const named = (text) => (text === null ? "" : ` ${JSON.stringify(text)}`);
    $("head-caption").textContent = `token ${row}${named(seen.rows[row])} gives ${percent(value)} to cell ${cell}${named(seen.cells[cell])}`;
  };
  // the rows as numbers, for those who cannot see the picture, and for who wants to copy them
  $("head-values").replaceChildren(...map.values.slice(-1).flatMap((row) => row.map((value, x) => [value, x]))
    .filter(([value]) => value >= 0.0005).sort((a, b) => b[0] - a[0]).slice(0, 5).map(([value, x]) => make("li", { "data-value": value,
      text: `${percent(value)} to ${seen.cells[map.columnEdges[x]] === null ? `cell ${map.columnEdges[x]}` : visible(seen.cells[map.columnEdges[x]])}` })));
}

function side(box, texts, fits) {
  box.replaceChildren(...(fits ? texts.map((text) => make("span", { text: text === null ? "·" : visible(text), title: text ?? "" })) : []));
}

function draw(canvas, values, width, height) {
  const context = prepared(canvas, width, height);
  const rows = values.length, columns = rows ? values[0].length : 0;
  values.forEach((row, y) => row.forEach((value, x) => {
    context.fillStyle = strength(Math.sqrt(value));
    context.fillRect((x * width) / columns, (y * height) / rows, width / columns + 0.5, height / rows + 0.5);
  }));
}

export function drawComparison({ firstDifference, steps }) {
  $("comparison-caption").textContent = firstDifference === null
    ? "The text did not change."
    : `Token ${firstDifference + 1} is the first that differs.`;
  const text = (value) => (value === null ? "" : visible(value));
  const figure = (value) => (value === null ? "" : value.toPrecision(3));
  const heads = ["token", "unchanged", "changed", "logits differ by", "KL divergence, nats"];
  $("compared").replaceChildren(
    make("tr", {}, ...heads.map((label) => make("th", { text: label }))),
    ...steps.map((step) => make("tr", { class: step.before === step.after ? null : "differs" },
      make("td", { text: String(step.number + 1) }), make("td", { text: text(step.before) }), make("td", { text: text(step.after) }),
      make("td", { text: figure(step.logitsBy) }), make("td", { text: figure(step.divergence) }))));
}
