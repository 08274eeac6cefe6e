// The debugger's page: what it shows follows from the adapter's answers at each stop.

import { Breakpoints } from "./breakpoints.js";
import { drawMap, Listing, parse } from "./listing.js";
import { drawAttention, drawComparison, drawHead, drawLens, drawNext, drawTokens } from "./looks.js";
import { $, dark, make } from "./parts.js";
import { Connection, literal, quoted } from "./protocol.js";
import { offerWeights } from "./tabs.js";
import { TensorView } from "./tensor.js";

const sources = new Map(); // listings by reference
let lines = [], here = null; // of the stop: {line, layer, block, name}
let visit = 0; // counts stops, so that late answers about an earlier one are not shown
let head = 0, seenLens = "";
let state = "connecting"; // running, stopped, over, lost

const connection = new Connection(onEvent, onLost);
const listing = new Listing({
  breakpoint: (line) => breakpoints.toggle(line),
  show: (line) => show(line.name),
  until: (line) => until(`${quoted(literal(line.name))} op=${line.op}`),
});
const breakpoints = new Breakpoints(connection, listing, fail);
const tensor = new TensorView(connection, changing);

// --- what the adapter tells ---

const EVENTS = {
  "instr/state": restored,
  "instr/changes": changed,
  "instr/breakpoints": (asked) => breakpoints.restore(asked, false),
  "instr/comparison": compared,
  stopped: (body) => atStop(body),
  continued: () => running(),
  breakpoint: (body) => breakpoints.changed(body.breakpoint),
  output: printed,
  exited: ({ exitCode }) => ended(exitCode),
};

function onEvent(name, body) {
  EVENTS[name]?.(body);
}

function onLost(isOver) {
  if (state === "over" && !isOver) return;
  become(isOver ? "over" : "lost", isOver ? "The session has ended" : "Not connected",
    isOver ? "The log is whole; this page can be closed." : "Does instr debug still run? Trying again …");
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
  $("messages").append(make("li", { text: output.trimEnd() }));
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

const WHY = { entry: "at the first op", step: "after a step", pause: "because you paused it", exception: "because of a NaN or an infinity" };

async function atStop({ reason, description }) {
  const mine = ++visit;
  const is = () => mine === visit;
  try {
    const { stackFrames } = await connection.request("stackTrace", { threadId: 1 });
    if (!is()) return;
    const [op, , , step] = stackFrames;
    await listed(op.source.sourceReference);
    if (!is()) return;
    here = lines[op.line - 1];
    here.isLast = lines[op.line]?.layer !== here.layer;
    const why = WHY[reason] ?? `at ${description}`;
    const place = here.layer < 0 ? here.block : `layer ${here.layer}, ${here.block}`;
    become("stopped", `Stopped ${why}`, `${here.name} · ${place} · ${step.name}`);
    clear();
    document.body.dataset.known = "";
    breakpoints.look(op.source.sourceReference);
    listing.stand(op.line, true);
    drawMap(lines, op.line, (line) => runTo(line));
    const shown = [describe(is), tensor.show(null), tokens(is), next(is), lens(is), attention(is)];
    const where = here.layer < 0 ? "" : `layer ${here.layer}`;
    const block = ["attention", "feed-forward"].includes(here.block) ? here.block : "";
    name($("ablate-block"), block && where && `the ${block} of ${where}`);
    name($("ablate-layer"), where && `all of ${where}`);
    $("ablations").hidden = !where;
    await Promise.all(shown);
    if (is()) document.body.dataset.visit = String(mine); // everything is drawn
  } catch (error) {
    if (is()) fail(error);
  }
}

function name(button, text) {
  button.hidden = !text;
  button.textContent = text;
}

async function listed(reference) {
  if (!sources.has(reference)) {
    const { content } = await connection.request("source", { sourceReference: reference });
    sources.set(reference, parse(content));
  }
  if (lines === sources.get(reference)) return;
  lines = sources.get(reference);
  listing.fill(lines);
}

async function describe(is) {
  const children = async ({ variablesReference }) =>
    (await connection.request("variables", { variablesReference })).variables;
  const { scopes } = await connection.request("scopes", { frameId: 1 });
  const named = new Map(scopes.map((scope) => [scope.name, scope]));
  const [params, read, weights] = await Promise.all(
    ["Op", "Sources", "Weights"].map((scope) => (named.has(scope) ? children(named.get(scope)) : [])));
  if (!is()) return;
  $("op-purpose").textContent = params.find(({ name }) => name === "purpose")?.value ?? "";
  $("op-text").textContent = here.text;
  $("params").replaceChildren(...params.filter(({ name }) => name !== "purpose")
    .flatMap(({ name, value }) => [make("dt", { text: name }), make("dd", { text: value })]));
  const rows = [...read.map((of) => [of, "reads"]), ...weights.map((of) => [of, "weight"])];
  $("sources").replaceChildren(...rows.map(([of, kind]) => make("tr", {}, make("td", { text: kind }),
    make("td", {}, of.variablesReference
      ? make("button", { type: "button", text: of.name, title: "Look at its values", onclick: () => show(of.name) })
      : make("span", { text: of.name })),
    make("td", { text: of.value }))));
}

async function tokens(is) {
  const seen = await connection.request("instr/tokens");
  if (is()) drawTokens(seen);
}

async function next(is) {
  let best = [];
  try {
    ({ best } = await connection.request("instr/next"));
  } catch { /* the logits are the last op's */ }
  if (!is()) return;
  drawNext(best);
  $("to-logits").hidden = best.length > 0;
  $("next-caption").textContent = best.length
    ? "The most probable tokens, by the scores that the model has just computed."
    : "Its probabilities are computed at the end of a decode. The logit lens below shows the guess so far.";
}

// The lens computes: it is asked only when another layer is complete.
async function lens(is) {
  if (!$("lens-box").open) return;
  const wanted = $("where").textContent.split(" · ").at(-1) + here.layer + here.isLast;
  if (wanted === seenLens) return;
  try {
    const { layers } = await connection.request("instr/lens", { top: 5 });
    if (!is()) return;
    seenLens = wanted;
    drawLens(layers);
    $("lens-problem").textContent = "";
  } catch (error) {
    if (!is()) return;
    $("lens").replaceChildren();
    $("lens-problem").textContent = `Not now: ${error.message}.`;
  }
}

async function attention(is) {
  if (!$("attention-box").open) return;
  const to = lines.find((line) => line.line > here.line && ["FLASH_ATTN_EXT", "SOFT_MAX"].includes(line.op))
    ?? lines.find((line) => ["FLASH_ATTN_EXT", "SOFT_MAX"].includes(line.op));
  name($("to-attention"), to ? `Run to the attention of layer ${to.layer}` : "");
  $("to-attention").onclick = () => runTo(to);
  try {
    const seen = await connection.request("instr/attention");
    if (!is()) return;
    $("attention-problem").textContent = "";
    if (head >= seen.heads) head = 0;
    drawAttention(seen, head, (chosen) => {
      head = chosen;
      attention(is);
    });
    const one = await connection.request("instr/attention", { head });
    if (!is()) return;
    $("head-box").hidden = false;
    $("head-name").textContent = `Layer ${seen.layer}, head ${head}`;
    $("ablate-head").textContent = `Leave out head ${head}`;
    $("ablate-head").onclick = () => command(`ablate layer=${seen.layer} head=${head}`);
    drawHead(one);
  } catch (error) {
    if (!is()) return;
    $("heads").replaceChildren();
    $("head-box").hidden = true;
    $("attention-caption").textContent = "How much each token (row) looks at each earlier one (column), in each head of a layer.";
    $("attention-problem").textContent = here.layer < 0 ? "" : `Not now: ${error.message}.`;
  }
}

async function show(of) {
  await tensor.show(here && of === here.name ? null : of);
}

// --- what the user does ---

function fail(error) {
  $("problem").textContent = error.message;
  $("problem").hidden = false;
}

function clear() {
  $("problem").hidden = true;
}

async function go(command, args = {}) {
  clear();
  try {
    await connection.request(command, { threadId: 1, ...args });
    running();
  } catch (error) {
    fail(error);
  }
}

// One of our commands. That the model goes on, or that something has changed, is an event.
function command(line) {
  clear();
  return connection.command(line).catch(fail);
}

const until = (text) => command(`until ${text}`);
const runTo = (line) => until(line.layer < 0 ? `${quoted(literal(line.name))} op=${line.op}`
  : `${quoted(literal(line.name))} op=${line.op} layer=${line.layer}`);

// By this page or another one.
async function changed({ changes }) {
  drawChanges(changes);
  const mine = visit;
  const is = () => mine === visit;
  if (here) await Promise.all([tensor.refresh(), next(is), attention(is)]);
}

function drawChanges(changes) {
  $("changes").replaceChildren(...changes.map((line) => make("li", {}, make("code", { text: line }))));
}

function changing() {
  $("tensor-back").hidden = tensor.name === null;
  const { name, slice } = tensor.place;
  $("change-what").textContent = `${name ?? here?.name ?? ""}${slice ? ` ${slice}` : ", all values"}:`;
}

for (const button of document.querySelectorAll("[data-step]"))
  button.onclick = () => command(`step ${button.dataset.step}`);
$("continue").onclick = () => go("continue");
$("pause").onclick = () => connection.request("pause", { threadId: 1 }).catch(fail);
$("quit").onclick = () => connection.quit();
$("to-logits").onclick = () => until("result_output");
$("tensor-back").onclick = () => show(here.name);
$("ablate-block").onclick = () => command(`ablate layer=${here.layer} block=${here.block}`);
$("ablate-layer").onclick = () => command(`ablate layer=${here.layer}`);
for (const button of document.querySelectorAll("[data-edit]"))
  button.onclick = () => {
    const { name, slice } = tensor.place;
    const edit = button.dataset.edit;
    const value = edit === "zero" ? "" : ` ${quoted($(`edit-${edit}`).value.trim())}`;
    command(`${edit}${value}${name === null ? "" : ` ${quoted(name)}`}${slice ? ` ${slice}` : ""}`);
  };
for (const [box, draw] of [["lens-box", lens], ["attention-box", attention]])
  $(box).addEventListener("toggle", () => {
    const mine = visit;
    if (here && $(box).open) draw(() => mine === visit);
  });

dark.addEventListener("change", () => {
  const mine = visit;
  if (here) attention(() => mine === visit);
});

const KEYS = { c: "continue", o: "op", b: "block", l: "layer", d: "decode" };
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
  const button = KEYS[event.key] && ($(KEYS[event.key]) ?? document.querySelector(`[data-step=${KEYS[event.key]}]`));
  if (button && !button.disabled) button.click();
});
