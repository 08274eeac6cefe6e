// The debugger's page: what it shows follows from the adapter's answers at each stop.

import { Breakpoints, drawMap, Listing, parse } from "./listing.js";
import { drawAttention, drawComparison, drawHead, drawLens, drawNext, drawTokens } from "./looks.js";
import { $, button, dark, make, row } from "./common.js";
import { TensorView } from "./tensor.js";

// The Debug Adapter Protocol over a WebSocket: requests, their answers, and events.
class Connection {
  #socket = null;
  #seq = 0;
  #waiting = new Map();
  #over = false;

  // `onEvent(name, body)`; `onLost(isOver)` when the connection ends; it reconnects on its own
  constructor(onEvent, onLost) {
    this.onEvent = onEvent;
    this.onLost = onLost;
    this.#open();
  }

  // The body of the answer; rejects with the adapter's line.
  request(command, args = {}) {
    if (this.#socket.readyState !== WebSocket.OPEN) return Promise.reject(new Error("not connected"));
    const seq = ++this.#seq;
    this.#socket.send(JSON.stringify({ seq, type: "request", command, arguments: args }));
    return new Promise((resolve, reject) => this.#waiting.set(seq, { resolve, reject }));
  }

  // Ends the session and the server.
  quit() {
    this.#over = true;
    return this.request("disconnect").catch(() => {});
  }

  #open() {
    const address = new URL("dap", location.href);
    address.protocol = "ws:";
    this.#socket = new WebSocket(address);
    this.#socket.onmessage = (message) => {
      const received = JSON.parse(message.data);
      if (received.type === "event") this.onEvent(received.event, received.body || {});
      else this.#answered(received);
    };
    this.#socket.onclose = () => {
      for (const { reject } of this.#waiting.values()) reject(new Error("the connection was lost"));
      this.#waiting.clear();
      this.onLost(this.#over);
      if (!this.#over) setTimeout(() => this.#open(), 1000);
    };
  }

  #answered(answer) {
    const waiting = this.#waiting.get(answer.request_seq);
    this.#waiting.delete(answer.request_seq);
    if (!waiting) return;
    if (answer.success) waiting.resolve(answer.body || {});
    else waiting.reject(new Error(answer.message || "refused"));
  }
}

// A word of a command, whatever is in it.
const quoted = (word) => (/^[\w.\-:]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);

// A name as a pattern that matches only itself.
const literal = (name) => name.replace(/[*?[]/g, "[$&]");

const sources = new Map(); // listings by reference
let lines = [], here = null; // of the stop: {line, layer, block, name}
let visit = 0; // counts stops
let head = 0, seenLens = "";
let state = "connecting"; // running, stopped, over, lost

const connection = new Connection((name, body) => EVENTS[name]?.(body), onLost);
const listing = new Listing({
  breakpoint: (line) => breakpoints.toggle(line),
  show: (line) => show(line.name),
  until: (line) => until(placeOf(line)),
});
const breakpoints = new Breakpoints(connection, listing, fail);
const tensor = new TensorView(connection, changing);

// --- what the adapter tells ---

const EVENTS = {
  "instr/state": restored,
  "instr/changes": changed,
  "instr/breakpoints": (asked) => breakpoints.restore(asked, false),
  "instr/comparison": compared,
  stopped: atStop,
  continued: running,
  breakpoint: (body) => breakpoints.changed(body.breakpoint),
  output: printed,
  exited: ({ exitCode }) => ended(exitCode),
};

function onLost(isOver) {
  if (state === "over" && !isOver) return;
  become(isOver ? "over" : "lost", isOver ? "The session has ended" : "Not connected",
    isOver ? "The log is whole; this page can be closed." : "Is instr debug still running? Trying again …");
}

function restored(snapshot) {
  sources.clear();
  seenLens = "";
  $("generated").textContent = "";
  $("messages").replaceChildren();
  printed({ category: "stdout", output: snapshot.text });
  for (const line of snapshot.lines) printed({ category: "console", output: line });
  drawChanges(snapshot.changes);
  if (snapshot.comparison) compared(snapshot.comparison);
  if (snapshot.weights) offerWeights(fail);
  breakpoints.restore(snapshot.breakpoints, true);
  if (snapshot.over) ended(snapshot.exitCode);
  else if (snapshot.stopped) atStop(snapshot.stopped);
  else running();
}

function printed({ category, output }) {
  if (category === "stdout") {
    $("generated").textContent += output;
    $("generated-line").hidden = !$("generated").textContent;
    return;
  }
  if (!output.trim()) return;
  $("output").hidden = false;
  $("messages").append(make("li", {}, output.trimEnd()));
}

function compared(comparison) {
  $("comparison").hidden = false;
  drawComparison(comparison);
  $("comparison").scrollIntoView({ block: "nearest" });
}

function ended(exitCode) {
  become("over", exitCode ? "The run has failed" : "The run has ended", "Quit ends the debugger.");
}

function become(now, words, where) {
  state = now;
  $("state").textContent = words;
  $("state").className = now;
  $("where").textContent = where;
  document.title = `${words} · instr debug`;
  const stopped = now === "stopped";
  for (const button of document.querySelectorAll("#controls button")) button.disabled = !stopped;
  $("pause").disabled = now !== "running";
  $("quit").disabled = now === "lost";
  for (const button of document.querySelectorAll("#edits button, #ablations button, #map button, #to-logits, #to-attention, #ablate-head"))
    button.disabled = !stopped;
  document.body.dataset.state = now;
  if (!stopped) {
    visit++;
    here = null;
  }
}

function running() {
  become("running", "Running", "");
  listing.stand(0);
}

// --- a stop ---

// The answer to a request about this stop; it never arrives if the model has gone on meanwhile.
function ask(command, args) {
  const mine = visit;
  const still = (then) => (answer) => mine === visit && then(answer);
  return new Promise((resolve, reject) => connection.request(command, args).then(still(resolve), still(reject)));
}

const WHY = { entry: "at the first op", step: "after a step", pause: "because you paused it", exception: "because of a NaN or an infinity" };

async function atStop({ reason, description }) {
  const mine = ++visit;
  try {
    const { stackFrames: [op, , , step] } = await ask("stackTrace", { threadId: 1 });
    await listed(op.source.sourceReference);
    here = lines[op.line - 1];
    here.isLast = lines[op.line]?.layer !== here.layer;
    const why = WHY[reason] ?? `at ${description}`;
    const place = here.layer < 0 ? here.block : `layer ${here.layer}, ${here.block}`;
    become("stopped", `Stopped ${why}`, `${here.name} · ${place} · ${step.name}`);
    clear();
    document.body.dataset.known = "";
    breakpoints.look(op.source.sourceReference);
    listing.stand(op.line, true);
    drawMap(lines, op.line, runTo);
    const shown = [describe(), tensor.show(null), ask("instr/tokens").then(drawTokens), next(), lens(), attention()];
    const where = here.layer < 0 ? "" : `layer ${here.layer}`;
    const block = ["attention", "feed-forward"].includes(here.block) ? here.block : "";
    name($("ablate-block"), block && where && `the ${block} of ${where}`);
    name($("ablate-layer"), where && `all of ${where}`);
    $("ablations").hidden = !where;
    await Promise.all(shown);
    if (mine === visit) document.body.dataset.visit = mine; // everything is drawn
  } catch (error) {
    fail(error);
  }
}

function name(button, text) {
  button.hidden = !text;
  button.textContent = text;
}

async function listed(reference) {
  if (!sources.has(reference)) {
    const { content } = await ask("source", { sourceReference: reference });
    sources.set(reference, parse(content));
  }
  if (lines === sources.get(reference)) return;
  lines = sources.get(reference);
  listing.fill(lines);
}

async function describe() {
  const children = async ({ variablesReference }) => (await ask("variables", { variablesReference })).variables;
  const { scopes } = await ask("scopes", { frameId: 1 });
  const named = new Map(scopes.map((scope) => [scope.name, scope]));
  const [params, read, weights] = await Promise.all(
    ["Op", "Sources", "Weights"].map((scope) => (named.has(scope) ? children(named.get(scope)) : [])));
  $("op-purpose").textContent = params.find(({ name }) => name === "purpose")?.value ?? "";
  $("op-text").textContent = here.text;
  $("params").replaceChildren(...params.filter(({ name }) => name !== "purpose")
    .flatMap(({ name, value }) => [make("dt", {}, name), make("dd", {}, value)]));
  const source = (kind) => (of) => row("td", [kind, make("td", {}, of.variablesReference
    ? button(of.name, () => show(of.name), { title: "Look at its values" }) : make("span", {}, of.name)), of.value]);
  $("sources").replaceChildren(...read.map(source("reads")), ...weights.map(source("weight")));
}

async function next() {
  const { best } = await ask("instr/next").catch(() => ({ best: [] })); // the logits are the last op's
  drawNext(best);
  $("to-logits").hidden = best.length > 0;
  $("next-caption").textContent = best.length
    ? "The most probable tokens, by the scores that the model has just computed."
    : "Its probabilities are computed at the end of a decode. The logit lens below shows the guess so far.";
}

// The lens computes: it is asked only when another layer is complete.
async function lens() {
  if (!$("lens-box").open) return;
  const wanted = $("where").textContent.split(" · ").at(-1) + here.layer + here.isLast;
  if (wanted === seenLens) return;
  try {
    const { layers } = await ask("instr/lens", { top: 5 });
    seenLens = wanted;
    drawLens(layers);
    $("lens-problem").textContent = "";
  } catch (error) {
    $("lens").replaceChildren();
    $("lens-problem").textContent = `Not now: ${error.message}.`;
  }
}

async function attention() {
  if (!$("attention-box").open) return;
  const all = lines.filter((line) => ["FLASH_ATTN_EXT", "SOFT_MAX"].includes(line.op));
  const to = all.find((line) => line.line > here.line) ?? all[0];
  name($("to-attention"), to ? `Run to the attention of layer ${to.layer}` : "");
  $("to-attention").onclick = () => runTo(to);
  try {
    const seen = await ask("instr/attention");
    $("attention-problem").textContent = "";
    if (head >= seen.heads) head = 0;
    drawAttention(seen, head, (chosen) => {
      head = chosen;
      attention();
    });
    const one = await ask("instr/attention", { head });
    $("head-box").hidden = false;
    $("head-name").textContent = `Layer ${seen.layer}, head ${head}`;
    $("ablate-head").textContent = `Leave out head ${head}`;
    $("ablate-head").onclick = () => command(`ablate layer=${seen.layer} head=${head}`);
    drawHead(one);
  } catch (error) {
    $("heads").replaceChildren();
    $("head-box").hidden = true;
    $("attention-caption").textContent = "How much each token (row) looks at each earlier one (column), in each head of a layer.";
    $("attention-problem").textContent = here.layer < 0 ? "" : `Not now: ${error.message}.`;
  }
}

const show = (of) => tensor.show(of === here?.name ? null : of);

// --- what the user does ---

function fail(error) {
  $("problem").textContent = error.message;
  $("problem").hidden = false;
}

function clear() {
  $("problem").hidden = true;
}

// One of our commands. An event says that the model goes on, or that something has changed.
function command(line) {
  clear();
  return connection.request("evaluate", { expression: line, context: "repl" }).catch(fail);
}

const until = (text) => command(`until ${text}`);
const placeOf = (line) => `${quoted(literal(line.name))} op=${line.op}`;
const runTo = (line) => until(line.layer < 0 ? placeOf(line) : `${placeOf(line)} layer=${line.layer}`);

// By this page or another one.
async function changed({ changes }) {
  drawChanges(changes);
  if (here) await Promise.all([tensor.refresh(), next(), attention()]);
}

function drawChanges(changes) {
  $("changes").replaceChildren(...changes.map((line) => make("li", {}, make("code", {}, line))));
}

function changing() {
  $("tensor-back").hidden = tensor.name === null;
  const { name, slice } = tensor;
  $("change-what").textContent = `${name ?? here?.name ?? ""}${slice ? ` ${slice}` : ", all values"}:`;
}

for (const button of document.querySelectorAll("[data-step]"))
  button.onclick = () => command(`step ${button.dataset.step}`);
$("continue").onclick = () => {
  clear();
  connection.request("continue", { threadId: 1 }).then(running, fail);
};
$("pause").onclick = () => connection.request("pause", { threadId: 1 }).catch(fail);
$("quit").onclick = () => connection.quit();
$("to-logits").onclick = () => until("result_output");
$("tensor-back").onclick = () => show(here.name);
$("ablate-block").onclick = () => command(`ablate layer=${here.layer} block=${here.block}`);
$("ablate-layer").onclick = () => command(`ablate layer=${here.layer}`);
for (const button of document.querySelectorAll("[data-edit]"))
  button.onclick = () => {
    const { name, slice } = tensor;
    const edit = button.dataset.edit;
    const value = edit === "zero" ? "" : ` ${quoted($(`edit-${edit}`).value.trim())}`;
    command(`${edit}${value}${name === null ? "" : ` ${quoted(name)}`}${slice ? ` ${slice}` : ""}`);
  };
for (const [box, draw] of [["lens-box", lens], ["attention-box", attention]])
  $(box).addEventListener("toggle", () => here && draw());

dark.addEventListener("change", () => here && attention());

// --- the weights of the model, which are read when their tab is first opened ---

const BASE = "weights/";
let started = false;

function loaded(element) {
  return new Promise((done, failed) => {
    Object.assign(element, { onload: done, onerror: () => failed(new Error("instr debug has ended")) });
    document.head.append(element);
  });
}

async function begin() {
  started = true;
  await Promise.all([
    loaded(make("script", { src: "uplot.js" })),
    loaded(make("link", { rel: "stylesheet", href: "uplot.css" })),
    loaded(make("link", { rel: "stylesheet", href: `${BASE}weights.css` })),
    fetch(`${BASE}begin`, { method: "POST" }),
  ]);
  const { mount } = await import(`./${BASE}weights.js`);
  await mount($("weights"), BASE);
}

// `fail` is called with the reason if the weights cannot be shown.
function offerWeights(fail) {
  $("tabs").hidden = false;
  const show = (weights) => {
    document.querySelector("main").hidden = weights;
    $("weights").hidden = !weights;
    $("tab-run").setAttribute("aria-pressed", !weights);
    $("tab-weights").setAttribute("aria-pressed", weights);
    if (weights && !started) begin().catch((error) => { started = false; fail(error); });
  };
  $("tab-run").onclick = () => show(false);
  $("tab-weights").onclick = () => show(true);
}

const KEYS = { c: "continue", o: "op", b: "block", l: "layer", d: "decode" };
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
  const button = KEYS[event.key] && ($(KEYS[event.key]) ?? document.querySelector(`[data-step=${KEYS[event.key]}]`));
  if (button && !button.disabled) button.click();
});
