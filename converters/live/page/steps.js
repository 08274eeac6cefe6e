// The strip of the latest steps, by their time, and the ops of the one that was chosen.

import { $, count, make, row } from "./common.js";
import { clock, drawSteps, duration, onSideways, STEP_WIDTH, text } from "./draw.js";
import * as time from "./time.js";

let what = null, drawnSteps = [], chosen = null;
let stepsUntil = null;  // the position of the last step that is shown; null follows the time

// Starts. `source()` returns what is shown ({steps, frame}).
export function start(source) {
  what = source;
  new ResizeObserver(() => { if (what().frame) drawStrip(); }).observe($("steps"));
}

// The strip follows the time again.
export function follow() {
  stepsUntil = null;
}

export function drawStrip() {
  const { steps, frame } = what();
  const begin = frame.session?.begin ?? 0, second = (step) => (step[5] - begin) / 1e9;
  let end = stepsUntil ?? steps.length;
  if (stepsUntil === null) while (end && second(steps[end - 1]) > time.right() + 1) end--;
  drawnSteps = drawSteps($("steps"), steps.slice(0, end), chosen);
  const [first, last] = [drawnSteps[0], drawnSteps.at(-1)];
  text("steps-note", last ? `Steps ${count(first[0])} to ${count(last[0])}, at ${clock(second(first))} to ${clock(second(last))}.`
    : steps.length ? `Steps before ${clock(second(steps[0]))} are not kept.` : "");
}

// Shows the steps up to the one at a position, and charts up to its time.
function scrollSteps(to) {
  const { steps, frame } = what();
  if (!steps.length) return;
  stepsUntil = Math.min(Math.max(Math.round(to), 1), steps.length);
  const last = stepsUntil;
  time.look(Math.ceil((steps[last - 1][5] - frame.session.begin) / 1e9));
  stepsUntil = last;
  drawStrip();
}

const position = () => what().steps.indexOf(drawnSteps.at(-1)) + 1;
let drag = null;

$("steps").addEventListener("pointerdown", (event) => {
  drag = { x: event.clientX, position: position(), moved: false };
  event.target.setPointerCapture(event.pointerId);
});
$("steps").addEventListener("pointermove", (event) => {
  if (!drag) return;
  const by = event.clientX - drag.x;
  drag.moved ||= Math.abs(by) > 5;
  if (drag.moved) scrollSteps(drag.position - by / STEP_WIDTH);
});
$("steps").addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) {
    const back = Math.ceil((event.target.getBoundingClientRect().right - event.clientX) / STEP_WIDTH);
    openStep(drawnSteps[drawnSteps.length - back]);
  }
  drag = null;
});
$("steps").addEventListener("pointercancel", () => { drag = null; });
onSideways($("steps"), (by) => scrollSteps(position() + by / STEP_WIDTH));
$("steps").addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], page = { PageUp: -1, PageDown: 1 }[event.key];
  if (!by && !page) return;
  event.preventDefault();
  if (page) {
    scrollSteps(position() + page * drawnSteps.length);
    return;
  }
  const steps = what().steps, at = steps.findIndex((step) => step[0] === chosen);
  const next = at < 0 ? position() - 1 : Math.min(Math.max(at + by, 0), steps.length - 1);
  if (!drawnSteps.includes(steps[next])) scrollSteps(next + 1);
  openStep(steps[next]);
});

async function openStep(step) {
  if (!step) return;
  chosen = step[0];
  drawStrip();
  const answer = await fetch(`step/${chosen}`);
  if (!answer.ok) {
    $("step").textContent = await answer.text();
    return;
  }
  const details = await answer.json();
  if (details.step[0] === chosen) showStep(details);
}

function showStep({ step, blocks, kernels }) {
  const title = make("p", {}, `Step ${step[0]}: ${step[2]} of ${count(step[3])} tokens, ${duration(step[6])}. ` +
    (kernels.length ? `${count(kernels.length)} kernels in the order in which they ran:` : "The log has no ops of it; record at level detailed."));
  const rows = kernels.map(([label, layer, block, gap, dur, device]) =>
    row("td", [label, device, layer < 0 ? "" : layer, blocks[block], duration(dur), duration(gap)]));
  const table = make("table", {}, row("th", ["op", "device", "layer", "block", "time", "before it"]), ...rows);
  $("step").replaceChildren(title, ...(kernels.length ? [table] : []));
}
