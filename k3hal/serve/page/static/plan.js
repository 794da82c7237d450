// The dispatch plan: which provider runs each operator, and what is proven of it.

import { byId, count, h } from "./dom.js";

const LEVELS = {
  E0: "declared, nothing proven",
  E1: "binds to the vendor's library, or compiles for the device",
  E2: "numerics proven off the device",
  E3: "operator conformance on the device",
  E4: "end-to-end model on the device",
  E5: "performance measured on the device",
};

function levelBadge(level) {
  const known = Object.hasOwn(LEVELS, level);
  return h("span", { class: `level ${known ? level : "unknown"}`, title: known ? LEVELS[level] : null }, level || "–");
}

/** `[0, 1, 2, 5]` as `0–2, 5`; empty for an operator outside the layers. */
export function layerRanges(layers) {
  const runs = [];
  for (const layer of layers) {
    if (runs.length && runs.at(-1)[1] === layer - 1) runs.at(-1)[1] = layer;
    else runs.push([layer, layer]);
  }
  return runs.map(([first, last]) => (first === last ? String(first) : `${first}–${last}`)).join(", ");
}

/** Entries that differ only in their layers, as one. */
export function merged(entries) {
  const rows = new Map();
  for (const entry of entries) {
    const { layers, dims, ...rest } = entry;
    const key = JSON.stringify(rest);
    if (rows.has(key)) rows.get(key).layers.push(...layers);
    else rows.set(key, { ...entry, layers: [...layers] });
  }
  return [...rows.values()].map((row) => ({ ...row, layers: row.layers.sort((a, b) => a - b) }));
}

const parts = (entry) =>
  Object.entries(entry.parts ?? {}).map(([op, part]) => h("li", {}, `${op}: ${part.provider ?? String(part)}`));

function provider(entry) {
  const flag = entry.reference ? "reference" : entry.composed ? "composed" : "";
  return h(
    "details",
    {},
    h("summary", {}, h("code", {}, entry.provider), flag && h("span", { class: "flag" }, flag)),
    h("ul", { class: "reasons" }, parts(entry), entry.reasons.map((reason) => h("li", {}, reason))),
  );
}

/** Long lists of ranges fold; a model's layers alternate, so that most lists are long. */
function layersCell(entry) {
  if (entry.layers.length === 0) return "–";
  const ranges = layerRanges(entry.layers);
  if (ranges.length <= 12) return ranges;
  return h("details", {}, h("summary", {}, count(entry.layers.length, "layer")), ranges);
}

const row = (entry) =>
  h(
    "tr",
    {},
    h("th", { scope: "row" }, h("code", {}, entry.op), entry.phase === "any" ? null : h("span", { class: "phase" }, entry.phase)),
    h("td", {}, levelBadge(entry.level)),
    h("td", {}, provider(entry)),
    h("td", { class: "layers" }, layersCell(entry)),
  );

function summary(rows) {
  return Object.keys(LEVELS)
    .map((level) => [level, rows.filter((entry) => entry.level === level).length])
    .filter(([, n]) => n)
    .reverse()
    .map(([level, n]) => h("div", {}, h("dt", {}, levelBadge(level)), h("dd", {}, `${n} × ${LEVELS[level]}`)));
}

/** Draw the plan of `page/about`. */
export function drawPlan(about) {
  const host = byId("plan-body");
  const plan = about.plan;
  if (plan === null) {
    const why = about.device === "replay" ? "A replay engine runs no operators: it" : "The engine";
    host.replaceChildren(h("p", { class: "quiet" }, `${why} has no dispatch plan.`));
    return;
  }
  const rows = merged(plan.entries);
  const machine = [plan.machine?.vendor, plan.machine?.arch].filter(Boolean).join(" ");
  host.replaceChildren(
    h("p", { class: "quiet" }, `${plan.model} in ${plan.dtype} on ${plan.device}${machine ? ` (${machine})` : ""}, policy ${plan.policy}`),
    h("dl", { class: "levels", "aria-label": "Operators by evidence level" }, summary(rows)),
    h(
      "div",
      { class: "scroll", role: "region", "aria-label": "Operators", tabindex: "0" },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ["Operator", "Evidence", "Provider", "Layers"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, rows.map(row)),
      ),
    ),
  );
}
