// The page of a live session: takes frames from the server and draws what is new.

import { cellAt, drawHeat, drawSteps, heatColour, makeChart, STEP_WIDTH } from "./draw.js";

const $ = (id) => document.getElementById(id);
const KEPT_SECONDS = 3600, KEPT_STEPS = 2000, KEPT_TOKENS = 1000, SHOWN_LANES = 40;

const kept = { seconds: new Map(), steps: [], lanes: new Map(), messages: [], frame: null };
let after = -1, lost = 0, paused = false, dirty = false, chosen = null, stale = "Connecting …";

// --- frames ---

function connect() {
  const address = new URL("frames", location.href);
  address.protocol = "ws:";
  address.searchParams.set("after", after);
  const socket = new WebSocket(address);
  socket.onmessage = (message) => {
    stale = "";
    take(JSON.parse(message.data));
  };
  socket.onclose = () => {
    if (kept.frame?.over) return;
    stale = "The server does not answer; trying again.";
    draw();
    setTimeout(connect, 1000);
  };
}

function take(frame) {
  if (frame.key) {
    lost += frame.lost || 0;
    kept.seconds.clear();
    kept.lanes.clear();
    kept.steps.length = kept.messages.length = 0;
  }
  after = frame.frame;
  kept.frame = frame;
  for (const second of frame.seconds) kept.seconds.set(second[0], second);
  while (kept.seconds.size > KEPT_SECONDS) kept.seconds.delete(kept.seconds.keys().next().value);
  kept.steps.push(...frame.steps);
  kept.steps.splice(0, kept.steps.length - KEPT_STEPS);
  kept.messages.push(...frame.messages);
  kept.messages.splice(0, kept.messages.length - 200);
  for (const lane of frame.lanes) {
    const tokens = kept.lanes.get(lane.lane)?.tokens ?? [];
    const next = tokens.length ? tokens.at(-1)[0] + 1 : 0;
    tokens.push(...lane.tokens.filter((token) => token[0] >= next));
    tokens.splice(0, tokens.length - KEPT_TOKENS);
    kept.lanes.set(lane.lane, { ...lane, tokens });
  }
  const over = [...kept.lanes.values()].filter((lane) => lane.over);
  for (const lane of over.slice(0, Math.max(0, kept.lanes.size - 320))) kept.lanes.delete(lane.lane);
  dirty = true;
}

// --- words ---

function duration(ns) {
  if (ns === null || ns === undefined) return "–";
  const [value, unit] = ns >= 1e9 ? [ns / 1e9, "s"] : ns >= 1e6 ? [ns / 1e6, "ms"] : [ns / 1e3, "µs"];
  return `${value.toPrecision(3)} ${unit}`.replace(/e\+\d+/, "");
}

const count = (n) => n.toLocaleString("en");
const mib = (bytes) => `${(bytes / 2 ** 20).toFixed(bytes < 2 ** 30 ? 1 : 0)} MiB`;
const middle = (values) => values.length ? values.sort((a, b) => a - b)[values.length >> 1] : null;

function text(id, value) {
  const element = $(id);
  if (element.textContent !== value) element.textContent = value;
}

// --- drawing ---

function draw() {
  const frame = kept.frame;
  const parts = [stale || (frame.over ? ended(frame.over) : frame.late ? "Reading what was recorded before …" : "Recording")];
  if (frame) parts.push(`${count(frame.n_steps)} steps`, `${count(frame.n_tokens)} tokens`);
  if (lost) parts.push(`${count(lost)} frames were not shown`);
  if (paused) parts.push("paused");
  text("state", parts.join(" · "));
  $("state").classList.toggle("stale", stale !== "" || Boolean(frame?.over));
  if (!frame || paused) return;
  drawFigures(frame);
  drawLanes();
  drawCharts();
  drawHeats(frame);
  drawnSteps = drawSteps($("steps"), kept.steps, chosen);
  drawMemory(frame);
  drawMessages();
}

function ended(over) {
  if (over === "closed") return "The session has ended";
  if (over === "not closed") return "The program ended and did not close the log";
  return `Reading stopped: ${over}`;
}

function drawFigures(frame) {
  const model = frame.session?.models.at(-1);
  if (model) text("model", `${model[1]} · ${model[2]}`);
  document.title = `${model ? model[1] : "instr"} – live`;
  const now = Math.floor(frame.t / 1e9);
  text("rate", count(kept.seconds.get(now - 1)?.[1] ?? kept.seconds.get(now)?.[1] ?? 0));
  const lanes = [...kept.lanes.values()].slice(-100);
  text("first", duration(middle(lanes.map((l) => l.to_first).filter((v) => v !== null))));
  text("between", duration(middle(lanes.map((l) => l.between).filter((v) => v !== null))));
  const under = lanes.filter((lane) => isActive(lane, frame)).length;
  text("active", count(under));
  const used = frame.caches.reduce((sum, c) => sum + c[2], 0), size = frame.caches.reduce((sum, c) => sum + c[3], 0);
  text("cells", size ? `${count(used)} / ${count(size)}` : "–");
  const rss = Math.max(0, ...frame.memory.map((of) => of[1]));
  text("memory", rss ? mib(rss) : "–");
  const threads = frame.threads.at(-1);
  if (threads) {
    const work = threads[1].reduce((a, b) => a + b, 0), wait = threads[2].reduce((a, b) => a + b, 0);
    text("threads", `${(100 * work / Math.max(work + wait, 1)).toFixed(0)} %`);
    $("threads").title = `${threads[1].length} threads in the log`;
  }
  const machine = frame.machine;
  if (machine) {
    const cpus = machine.cpu / machine.dur;
    text("machine", `${cpus.toFixed(1)} / ${machine.cpus} CPUs`);
    $("machine").title = `load ${machine.load ?? "unknown"}; threads waited ${duration(machine.delay)} for a CPU`;
  }
}

// the application may never say that a request is over; one that gets no token for long is idle
function isActive(lane, frame) {
  return !lane.over && frame.t + frame.session.begin - lane.end < Math.max(1e9, 20 * (lane.between ?? 0));
}

const elements = new Map();

function drawLanes() {
  const frame = kept.frame;
  const lanes = [...kept.lanes.values()];
  const shown = lanes.sort((a, b) => isActive(b, frame) - isActive(a, frame) || b.lane - a.lane).slice(0, SHOWN_LANES);
  const place = $("lanes"), colour = $("colour").value;
  const times = shown.map((lane) => lane.between).filter((v) => v);
  const usual = middle(times) ?? 1e6;
  text("scale", colour === "time" ? `plain: ${duration(usual)} or less, strong: ${duration(16 * usual)} or more` : "plain: certain, strong: unlikely");
  for (const [number, of] of elements) {
    if (!shown.some((lane) => lane.lane === number)) {
      of.element.remove();
      elements.delete(number);
    }
  }
  shown.forEach((lane, i) => {
    const of = elements.get(lane.lane) ?? newLane(lane.lane);
    if (place.children[i] !== of.element) place.insertBefore(of.element, place.children[i] ?? null);
    of.element.classList.toggle("over", !isActive(lane, frame));
    const name = lane.name || `sequence ${lane.seq} of context ${lane.ctx}`;
    const state = isActive(lane, frame) ? (lane.to_first === null ? "prompt" : "generating") : lane.over ? "done" : "idle";
    if (of.name.textContent !== name) of.name.textContent = name;
    const facts = [
      ` ${state}`,
      `prompt: ${count(lane.prompt)} computed${lane.reused ? `, ${count(lane.reused)} reused` : ""}`,
      `${count(lane.n_tokens)} generated`,
      `first token ${duration(lane.to_first)}; then ${duration(lane.between)} each`,
    ].join("\n");
    if (of.facts.textContent !== facts) of.facts.textContent = facts;
    drawText(of, lane, colour, usual);
  });
}

function newLane(number) {
  const element = document.createElement("article");
  element.className = "lane";
  element.innerHTML = '<div class="facts"><b></b><span></span></div><div class="text"></div>';
  const [facts, words] = element.children;
  facts.lastChild.style.whiteSpace = "pre-line";
  const of = { element, name: facts.firstChild, facts: facts.lastChild, words, next: 0, colour: "" };
  elements.set(number, of);
  return of;
}

function drawText(of, lane, colour, usual) {
  if (of.colour !== colour) {
    of.colour = colour;
    of.next = 0;
    of.words.textContent = "";
  }
  const bottom = of.words.scrollTop + of.words.clientHeight >= of.words.scrollHeight - 20;
  lane.tokens.forEach((token, i) => {
    if (token[0] < of.next) return;
    const span = document.createElement("span");
    span.textContent = token[1];
    const gap = i ? token[2] - lane.tokens[i - 1][2] : null;
    let share = 0;
    if (colour === "p") share = token[3] === null ? 0 : 1 - token[3];
    else if (gap) share = Math.min(1, Math.max(0, Math.log2(gap / usual) / 4));
    if (share > 0.02) span.style.background = heatColour(0.8 * share);
    span.title = [gap === null ? "" : `${duration(gap)} after the token before`, token[3] === null ? "" : `probability ${(100 * token[3]).toFixed(1)} %`].filter(Boolean).join(", ");
    of.words.append(span);
    of.next = token[0] + 1;
  });
  while (of.words.childElementCount > KEPT_TOKENS) of.words.firstChild.remove();
  if (bottom) of.words.scrollTop = of.words.scrollHeight;
}

const charts = {};

function drawCharts() {
  if (!charts.rate) {
    charts.rate = makeChart($("chart-rate"), [["generated", "#0a7ea4"], ["of prompts", "#8250df"]], count);
    charts.cells = makeChart($("chart-cells"), [["used", "#1a7f37"]], count);
    charts.memory = makeChart($("chart-memory"), [["resident", "#bf8700"]], count);
    charts.cpu = makeChart($("chart-cpu"), [["used", "#0a7ea4"], ["waiting", "#cf222e"]], (v) => v.toFixed(1));
  }
  const seconds = [...kept.seconds.values()].sort((a, b) => a[0] - b[0]);
  const all = [];  // seconds in which nothing happened are zero
  for (const second of seconds) {
    const before = all.at(-1);
    if (before && second[0] - before[0] > 1) {
      all.push([before[0] + 1, 0, 0, 0, 0, before[5], before[6], 0, 0], [second[0] - 1, 0, 0, 0, 0, before[5], before[6], 0, 0]);
    }
    all.push(second);
  }
  const x = all.map((s) => s[0]), column = (i, by = 1) => all.map((s) => s[i] / by);
  charts.rate.setData([x, column(1), column(2)]);
  charts.cells.setData([x, column(5)]);
  charts.memory.setData([x, column(6, 2 ** 20)]);
  charts.cpu.setData([x, column(7, 1e9), column(8, 1e9)]);
}

function drawHeats(frame) {
  const phases = Object.keys(frame.heat), select = $("phase");
  if ([...select.options].map((o) => o.value).join() !== phases.join()) {
    const before = select.value;
    select.replaceChildren(...phases.map((phase) => new Option(phase, phase)));
    select.value = phases.includes(before) ? before : phases.includes("decode") ? "decode" : phases[0];
  }
  const heat = frame.heat[select.value];
  if (!heat) return;
  const most = Math.max(...heat.mean.flat(), ...heat.last.flat());
  drawHeat($("heat-last"), heat.last, most);
  drawHeat($("heat-mean"), heat.mean, most);
  const total = (rows) => duration(rows.flat().reduce((a, b) => a + b, 0));
  for (const place of document.querySelectorAll(".columns")) {
    if (place.childElementCount === heat.blocks.length) continue;
    place.replaceChildren(...heat.blocks.map((name) => Object.assign(document.createElement("span"), { textContent: name, title: name })));
  }
  text("heat-note", `rows: outside of layers, then each layer; latest ${total(heat.last)}, average ${total(heat.mean)} of ${count(heat.steps)} steps`);
}

for (const which of ["last", "mean"]) {
  $(`heat-${which}`).addEventListener("mousemove", (event) => {
    const heat = kept.frame?.heat[$("phase").value];
    const cell = heat && cellAt(event.target, event, heat[which].length, heat.blocks.length);
    if (!cell) return;
    const [row, column] = cell;
    const layer = row ? `layer ${row - 1}` : "outside of layers";
    text("heat-cell", `${layer}, ${heat.blocks[column]}: latest ${duration(heat.last[row][column])}, average ${duration(heat.mean[row][column])}`);
  });
}

let drawnSteps = [];

$("steps").addEventListener("click", async (event) => {
  const box = event.target.getBoundingClientRect();
  const back = Math.ceil((box.right - event.clientX) / STEP_WIDTH);
  const step = drawnSteps[drawnSteps.length - back];
  if (!step) return;
  chosen = step[0];
  drawSteps($("steps"), kept.steps, chosen);
  const answer = await fetch(`step/${chosen}`);
  if (!answer.ok) {
    $("step").textContent = await answer.text();
    return;
  }
  showStep(await answer.json());
});

function showStep({ step, blocks, kernels }) {
  const table = document.createElement("table");
  const rows = [["op", "layer", "block", "time", "before it"]];
  for (const [label, layer, block, gap, dur] of kernels) {
    rows.push([label, layer < 0 ? "" : layer, blocks[block], duration(dur), duration(gap)]);
  }
  const title = document.createElement("p");
  title.textContent = `Step ${step[0]}: ${step[2]} of ${count(step[3])} tokens, ${duration(step[6])}. ` +
    (kernels.length ? `${count(kernels.length)} kernels in the order in which they ran:` : "The log has no ops of it; record at --level detailed.");
  rows.forEach((cells, i) => {
    const row = table.insertRow();
    for (const cell of cells) {
      const element = document.createElement(i ? "td" : "th");
      element.textContent = cell;
      row.append(element);
    }
  });
  $("step").replaceChildren(title, ...(kernels.length ? [table] : []));
}

function drawMemory(frame) {
  const rows = [["buffer", "weights", "cache", "compute"]];
  for (const [ctx, , buffers] of frame.memory) {
    for (const [name, ...sizes] of buffers) rows.push([`${name}, context ${ctx}`, ...sizes.map(mib)]);
  }
  const key = JSON.stringify(rows);
  if ($("buffers").dataset.key === key) return;
  $("buffers").dataset.key = key;
  $("buffers").replaceChildren(...rows.map((cells, i) => {
    const row = document.createElement("tr");
    row.append(...cells.map((cell) => Object.assign(document.createElement(i ? "td" : "th"), { textContent: cell })));
    return row;
  }));
}

function drawMessages() {
  const list = $("messages");
  const next = Number(list.dataset.next ?? 0);
  for (const [number, , level, words] of kept.messages) {
    if (number < next) continue;
    const item = document.createElement("li");
    item.className = level;
    item.textContent = words;
    list.prepend(item);
    list.dataset.next = number + 1;
  }
  while (list.childElementCount > 200) list.lastChild.remove();
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").textContent = paused ? "Continue" : "Pause";
  $("pause").setAttribute("aria-pressed", paused);
  draw();
});
$("colour").addEventListener("change", draw);
$("phase").addEventListener("change", draw);

function tick() {
  if (dirty) {
    dirty = false;
    draw();
  }
  requestAnimationFrame(tick);
}

connect();
tick();
