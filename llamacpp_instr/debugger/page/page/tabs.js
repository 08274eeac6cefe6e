// Two views of the model: its run, and its weights, which are read when their tab is first opened.

import { $, make } from "./parts.js";

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
export function offerWeights(fail) {
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
