// The page of a live session: takes frames from the server and draws what is new.

import { $, cellAt, count, make, row } from "./common.js";
import { clock, drawHeat, duration, heatColour, mib, put, text } from "./draw.js";
import * as strip from "./steps.js";
import * as time from "./time.js";

const KEPT_SECONDS = 3600, KEPT_STEPS = 2000, KEPT_TOKENS = 1000, SHOWN_LANES = 40;

const kept = { seconds: new Map(), steps: [], lanes: new Map(), messages: [], frame: null };
let after = -1, lost = 0, dirty = false, stale = "Connecting …";
let frozen = null;  // the state when it was paused
const what = () => frozen ?? kept;

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

// --- drawing ---

function draw() {
  const frame = kept.frame;
  const parts = [stale || (frame.over ? ended(frame.over) : frame.late ? "Catching up with the log …" : "Recording")];
  if (frame) {
    parts.push(clock(frame.t / 1e9), `${count(frame.n_steps)} steps`, `${count(frame.n_tokens)} tokens`);
    if (frame.n_failed) parts.push(`${count(frame.n_failed)} steps failed`);
    if (frame.n_messages) parts.push(`${count(frame.n_messages)} message${frame.n_messages > 1 ? "s" : ""}`);
    if (frame.computing?.[2] > 1e9) parts.push(`${frame.computing[0]} of ${count(frame.computing[1])} tokens for ${duration(frame.computing[2])}`);
  }
  if (lost) parts.push(`${count(lost)} frames were not shown`);
  if (frozen) parts.push("paused");
  text("state", parts.join(" · "));
  $("state").classList.toggle("stale", stale !== "" || Boolean(frame?.over) || Boolean(frame?.n_failed));
  if (!frozen) drawAll();
}

// also while it is paused, when the user chooses to see something else
function drawAll() {
  const frame = what().frame;
  if (!frame) return;
  drawFigures(frame);
  drawDevices(frame);
  drawSlots(frame);
  drawLanes(frame);
  time.drawCharts();
  drawHeats(frame);
  strip.drawStrip();
  drawMemory(frame);
  drawMessages();
}

function ended(over) {
  if (over === "closed") return "The session has ended";
  if (over === "not closed") return "The program ended without closing the log";
  return `Reading stopped: ${over}`;
}

function drawFigures(frame) {
  const model = frame.session?.models.at(-1);
  if (model) text("model", `${model[1]} · ${model[2]}`);
  document.title = `${model ? model[1] : "instr"} – live`;
  text("rate", count(frame.rate));
  text("first", duration(frame.to_first));
  text("between", duration(frame.between));
  text("active", count(frame.active.length));
  text("queued", count(frame.queued));
  text("reused", frame.reused === null ? "–" : `${(100 * frame.reused).toFixed(0)} %`);
  text("cells", frame.cells ? `${count(frame.cells[0])} / ${count(frame.cells[1])}` : "–");
  text("memory", frame.rss ? mib(frame.rss) : "–");
  text("threads", frame.working === null ? "–" : `${(100 * frame.working).toFixed(0)} %`);
  const machine = frame.machine;
  if (machine) {
    const cpus = machine.cpu / machine.dur;
    text("machine", `${cpus.toFixed(cpus < 1 ? 2 : 1)} / ${machine.cpus}`);
    $("machine").title = `load ${machine.load ?? "unknown"}; threads waited ${duration(machine.delay)} for a CPU`;
  }
}

// A figure for each device that computes behind the first thread, also when a call has returned.
function drawDevices(frame) {
  $("devices").replaceChildren(...frame.devices.map(([name, ns, held, total]) => {
    const busy = `${(100 * ns / Math.max(frame.t, 1)).toFixed(0)} %`;
    const memory = total ? `; ${mib(held)} of ${mib(total)} held` : "";
    return make("div", {}, make("b", {}, busy), make("span", {}, `of the time in kernels on ${name}${memory}`));
  }));
  $("devices").hidden = !frame.devices.length;
}

// What happened to a request, or what it is doing.
function stateOf(lane, isActive) {
  if (!isActive) return lane.reason ?? (lane.over ? "done" : "idle");
  return lane.to_first === null ? "prompt" : "generating";
}

// The slots of a server that says which request each took, and its queue.
function drawSlots(frame) {
  for (const part of document.querySelectorAll(".of-server")) part.hidden = !frame.slots.length;
  text("queue-note", frame.queued ? `${count(frame.queued)} more wait, the first for ${duration(frame.waits)}.` : "None is waiting.");
  const place = $("slots"), active = new Set(frame.active);
  while (place.children.length > frame.slots.length) place.lastChild.remove();
  frame.slots.forEach((number, slot) => {
    const of = place.children[slot] ?? place.appendChild(make("div", {}, make("b"), make("span")));
    const lane = what().lanes.get(number), works = active.has(number);
    const state = works && lane ? stateOf(lane, true) : "free";
    const read = lane && `${count(lane.reused + lane.prompt)} of ${count(lane.size)} tokens`;
    put(of.firstChild, state);
    const does = state === "prompt" ? read : state === "generating" ? `${count(lane.n_tokens)} tokens` : `keeps ${count(frame.held[slot])} tokens`;
    put(of.lastChild, `slot ${slot}: ${does}`);
    of.title = `${count(frame.held[slot])} tokens in the cache`;
    of.classList.toggle("free", state === "free");
  });
  const copies = frame.copies;
  text("copies", copies ? `Copies of prompts in RAM: ${count(copies.prompts)}, ${mib(copies.bytes)}${copies.limit ? ` of ${mib(copies.limit)}` : ""}; ${count(copies.save)} were copied from slots, ${count(copies.load)} back to slots.` : "");
}

const elements = new Map();

function drawLanes(frame) {
  const lanes = [...what().lanes.values()], active = new Set(frame.active);
  const isActive = (lane) => active.has(lane.lane);
  const shown = lanes.sort((a, b) => isActive(b) - isActive(a) || b.lane - a.lane).slice(0, SHOWN_LANES);
  const place = $("lanes"), colour = $("colour").value;
  const times = shown.map((lane) => lane.between).filter((v) => v).sort((a, b) => a - b);
  const usual = times[times.length >> 1] ?? 1e6;
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
    of.element.classList.toggle("over", !isActive(lane));
    put(of.name, lane.task !== null ? `task ${lane.task}, slot ${lane.seq}` : lane.name || `sequence ${lane.seq}${frame.session.contexts.length > 1 ? ` of context ${lane.ctx}` : ""}`);
    put(of.facts, [
      ` ${stateOf(lane, isActive(lane))}`,
      `prompt: ${count(lane.prompt)} computed${lane.reused ? `, ${count(lane.reused)} reused` : ""}`,
      `${count(lane.n_tokens)} generated`,
      `first token ${duration(lane.to_first)}; then ${duration(lane.between)} each`,
    ].join("\n"));
    drawText(of, lane, colour, usual);
  });
}

function newLane(number) {
  const [name, facts, words] = [make("b"), make("span"), make("div", { class: "text" })];
  const element = make("article", { class: "lane" }, make("div", { class: "facts" }, name, facts), words);
  const of = { element, name, facts, words, next: 0, colour: "" };
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
    const gap = i ? token[2] - lane.tokens[i - 1][2] : null;
    let share = 0;
    if (colour === "p") share = token[3] === null ? 0 : 1 - token[3];
    else if (gap) share = Math.min(1, Math.max(0, Math.log2(gap / usual) / 4));
    const facts = [gap === null ? "" : `${duration(gap)} after the previous token`, token[3] === null ? "" : `probability ${(100 * token[3]).toFixed(1)} %`];
    const span = make("span", { title: facts.filter(Boolean).join(", ") }, token[1]);
    if (share > 0.02) span.style.background = heatColour(0.8 * share);
    of.words.append(span);
    of.next = token[0] + 1;
  });
  while (of.words.childElementCount > KEPT_TOKENS) of.words.firstChild.remove();
  if (bottom) of.words.scrollTop = of.words.scrollHeight;
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
  // a single slow kernel does not change the scale
  drawHeat($("heat-last"), heat.last, heat.mean);
  drawHeat($("heat-mean"), heat.mean, heat.mean);
  const total = (rows) => duration(rows.flat().reduce((a, b) => a + b, 0));
  for (const place of document.querySelectorAll(".columns")) {
    if (place.childElementCount === heat.blocks.length) continue;
    place.replaceChildren(...heat.blocks.map((title) => make("span", { title }, title)));
  }
  text("heat-note", `Top row: outside of layers. Latest ${total(heat.last)}, average ${total(heat.mean)} of ${count(heat.steps)} steps.`);
}

for (const which of ["last", "mean"]) {
  $(`heat-${which}`).addEventListener("mousemove", (event) => {
    const heat = what().frame?.heat[$("phase").value];
    const cell = heat && cellAt(event, heat[which]);
    if (!cell) return;
    const [y, x] = cell;
    const layer = y ? `layer ${y - 1}` : "outside of layers";
    text("heat-cell", `${layer}, ${heat.blocks[x]}: latest ${duration(heat.last[y][x])}, average ${duration(heat.mean[y][x])}`);
  });
}

function drawCaches(frame) {
  const place = $("caches");
  frame.caches.forEach(([ctx, cache, used, size, bytes, moves], i) => {
    const line = place.children[i] ?? place.appendChild(make("p", {}, make("span"), make("meter"), make("span")));
    const [name, meter, description] = line.children;
    name.textContent = `cache${frame.caches.length > 1 ? ` ${cache} of context ${ctx}` : ""}`;
    meter.max = size;
    meter.value = used;
    description.textContent = `${count(used)} of ${count(size)} cells, ${mib(bytes)}${moves ? `; cells were moved ${count(moves)} times` : ""}`;
  });
  while (place.children.length > frame.caches.length) place.lastChild.remove();
}

function drawMemory(frame) {
  drawCaches(frame);
  const key = JSON.stringify(frame.memory);
  if ($("buffers").dataset.key === key) return;
  $("buffers").dataset.key = key;
  const rows = frame.memory.flatMap(([ctx, , buffers]) =>
    buffers.map(([name, ...sizes]) => row("td", [`${name}, context ${ctx}`, ...sizes.map(mib)])));
  $("buffers").replaceChildren(row("th", ["buffer", "weights", "cache", "compute"]), ...rows);
}

function drawMessages() {
  const list = $("messages");
  const next = Number(list.dataset.next ?? 0);
  for (const [number, , level, words] of what().messages) {
    if (number < next) continue;
    list.prepend(make("li", { class: level }, words));
    list.dataset.next = number + 1;
  }
  while (list.childElementCount > 200) list.lastChild.remove();
}

// Keeps the current state. The counting goes on.
function pause() {
  const lanes = [...kept.lanes].map(([number, lane]) => [number, { ...lane, tokens: [...lane.tokens] }]);
  frozen = {
    frame: kept.frame, lanes: new Map(lanes), seconds: new Map(kept.seconds), steps: [...kept.steps],
    messages: [...kept.messages],
  };
}

$("pause").addEventListener("click", () => {
  if (frozen) {
    frozen = null;
    time.look(null);
  } else {
    pause();
  }
  pauseChanged();
});
time.start(what, (isBack) => {
  if (isBack && !frozen) pause();
  strip.follow();
  pauseChanged();
});

function pauseChanged() {
  $("pause").textContent = frozen ? "Resume" : "Pause";
  $("pause").setAttribute("aria-pressed", Boolean(frozen));
  draw();
  drawAll();
}
$("colour").addEventListener("change", drawAll);
$("phase").addEventListener("change", drawAll);
strip.start(what);

function tick() {
  if (dirty) {
    dirty = false;
    draw();
  }
  requestAnimationFrame(tick);
}

connect();
tick();
