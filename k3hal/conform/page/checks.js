// A list of checks: rows are made as they are asked for, and a check's numbers when it is opened.

const STEP = 50;
const SEVERITY = ["Crash", "Timeout", "Fail", "Waived", "QualityWarning", "Pass", "NotSupported"];
const SORTS = {
  worst: ["Worst first", (a, b) => severity(a) - severity(b) || nearness(b) - nearness(a)],
  cap: ["Nearest to a cap", (a, b) => nearness(b) - nearness(a)],
  slow: ["Slowest", (a, b) => rows[b][SECONDS] - rows[a][SECONDS]],
  name: [
    "By name",
    (a, b) => text(a, "op").localeCompare(text(b, "op")) || text(a, "case").localeCompare(text(b, "case")),
  ],
};
const severity = (row) => SEVERITY.indexOf(text(row, "status"));

/** Fill `host` with a list of checks; `full` has the columns of operator and provider, `open` opens the first. */
function showChecks(host, list, { caption, full = false, sort = "worst", open = false }) {
  if (list.length === 0) {
    host.replaceChildren(h("p", { class: "empty" }, "No check matches."));
    return;
  }
  const body = h("tbody", {});
  const more = h("button", { type: "button", onclick: () => grow(true) });
  const select = h(
    "select",
    { onchange: () => restart(select.value) },
    Object.entries(SORTS).map(([key, [label]]) => h("option", { value: key, selected: key === sort }, label)),
  );
  let ordered = [];
  let shown = 0;
  function restart(by) {
    ordered = list.slice().sort(SORTS[by][1]);
    shown = 0;
    body.replaceChildren();
    grow(false);
  }
  function grow(focus) {
    const fresh = ordered.slice(shown, shown + STEP).map((row) => checkRow(row, full));
    shown += fresh.length;
    body.append(...fresh);
    const left = ordered.length - shown;
    more.hidden = left === 0;
    more.textContent = `Show ${Math.min(STEP, left)} more of ${left.toLocaleString("en")}`;
    if (focus) fresh[0].querySelector("button").focus();
  }
  restart(sort);
  const label = h("label", { class: "sort" }, "Order", select);
  host.replaceChildren(
    ...(list.length > 1 ? [label] : []),
    h(
      "div",
      { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
      h("table", { class: "checks" }, h("caption", { class: "unseen" }, caption), heading(full), body),
    ),
    more,
  );
  if (open) body.querySelector("button").click();
}

function heading(full) {
  const names = [["Check"], ...(full ? [["Provider", "wide"]] : []), ["dtype", "wide"], ["Shape", "wide"]];
  const numbers = [
    ["Tensor", "n wide"],
    ["Slice", "n wide"],
    ["Peak", "n wide"],
    ["Ratio", "n wide"],
    ["Of cap", "n"],
    ["Time", "n wide"],
  ];
  const columns = [["Status"], ...names, ...numbers];
  return h(
    "thead",
    {},
    h(
      "tr",
      {},
      columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)),
    ),
  );
}

/** The output that decided a check: the worst status, then the largest error. */
function leading(check) {
  const rank = (tensor) => SEVERITY.indexOf(tensor.status);
  return check.tensors
    .slice()
    .sort((a, b) => rank(a) - rank(b) || (b.numbers.tensor ?? Infinity) - (a.numbers.tensor ?? Infinity))[0];
}

function checkRow(row, full) {
  const check = checkAt(row);
  const top = leading(check);
  const share = nearness(row);
  const value = (name) => (top ? number(top.numbers[name]) : "");
  const button = h(
    "button",
    { type: "button", class: "open", "aria-expanded": "false", onclick: () => toggle(line, button, check, full) },
    h("span", { class: "twist", "aria-hidden": "true" }),
    h("span", {}, full ? h("span", { class: "op" }, check.op) : null, h("span", { class: "case" }, check.case)),
  );
  const kind = check.kind === "sample" ? null : h("span", { class: "tag" }, check.kind.replace(":", " "));
  const reason =
    check.problems[0] ?? check.tensors.map((one) => one.problem && `${one.name}: ${one.problem}`).find(Boolean);
  const line = h(
    "tr",
    { class: `check ${statusOf(check.status).tone}` },
    h("td", {}, statusBadge(check.status)),
    h(
      "th",
      { scope: "row" },
      button,
      h("div", { class: "below" }, kind, reason ? h("span", { class: "reason" }, reason) : null),
    ),
    full ? h("td", { class: "wide mono" }, check.provider) : null,
    h("td", { class: "wide" }, check.dtype),
    h("td", { class: "wide" }, check.shape_class),
    h("td", { class: "n wide" }, value("tensor")),
    h("td", { class: "n wide" }, value("slice")),
    h("td", { class: "n wide" }, value("peak")),
    h("td", { class: "n wide" }, top ? (top.ratio === null ? "–" : number(top.ratio)) : ""),
    h("td", { class: "n" }, top ? percent(share) : ""),
    h("td", { class: "n wide" }, seconds(check.seconds)),
  );
  return line;
}

function toggle(line, button, check, full) {
  const open = button.getAttribute("aria-expanded") === "false";
  button.setAttribute("aria-expanded", String(open));
  if (!open) return line.nextElementSibling.remove();
  line.after(h("tr", { class: "more" }, h("td", { colspan: line.children.length }, evidence(check, full))));
}

/** Everything that is known of one check. */
function evidence(check, full) {
  const facts = [
    ["Operator", full && h("code", {}, check.op)],
    ["Provider", full && h("code", {}, check.provider)],
    ["Check", check.kind === "sample" ? "sample against the golden" : check.kind.replace(":", " ")],
    ["Case", h("code", {}, check.case), "long"],
    ["dtype", check.dtype],
    ["Shape class", check.shape_class],
    ["Phase", check.phase],
    ["Time", seconds(check.seconds)],
    ["Waiver", check.waiver],
    ["Case file", check.case_file && h("code", {}, check.case_file), "long"],
  ];
  return h(
    "div",
    { class: "evidence" },
    check.problems.length
      ? h(
          "ul",
          { class: "problems" },
          check.problems.map((problem) => h("li", {}, problem)),
        )
      : null,
    check.tensors.length ? tensorTable(check) : h("p", { class: "empty" }, "No output was judged."),
    check.commands.length
      ? h("p", { class: "label" }, check.case_file ? "Reproduce, in the package's folder" : "Reproduce")
      : null,
    check.commands.map(command),
    h(
      "dl",
      { class: "facts" },
      facts
        .filter(([, value]) => value)
        .map(([name, value, size]) => h("div", { class: size }, h("dt", {}, name), h("dd", {}, value))),
    ),
  );
}

function tensorTable(check) {
  const columns = [
    ["Output"],
    ["Status"],
    ["Class"],
    ["Tensor", "n"],
    ["Slice", "n"],
    ["Peak", "n"],
    ["Peer", "n"],
    ["Ratio", "n"],
    ["Why", "why"],
  ];
  const lines = check.tensors.map((tensor) => [
    h("code", {}, tensor.name),
    statusBadge(tensor.status),
    tensor.tolerance,
    ...["tensor", "slice", "peak"].map((name) => measured(tensor, name)),
    peerOf(tensor),
    tensor.ratio === null ? "–" : `${number(tensor.ratio)} ×`,
    tensor.problem,
  ]);
  return table(`Numbers of ${check.case}`, columns, lines);
}

/** The peer's error with the floor beneath: the larger one is what the ratio is to. */
function peerOf(tensor) {
  const floor = tensor.caps?.floor;
  return h(
    "span",
    { class: "measured" },
    h("span", {}, tensor.peer === null ? "none" : number(tensor.peer)),
    floor ? h("span", { class: "cap" }, `floor ${number(floor)}`) : null,
  );
}

/** A number over its cap, with a bar for how much of the cap it takes. */
function measured(tensor, name) {
  const value = tensor.numbers[name];
  const caps = tensor.caps;
  const cap = caps?.exact ? 0 : caps?.[name];
  const label = !caps
    ? "no cap known"
    : caps.exact
      ? "bit-exact"
      : cap === null || cap === undefined
        ? "no cap"
        : `cap ${number(cap)}`;
  const share = value === null ? 1 : cap ? Math.min(1, value / cap) : cap === 0 && value > 0 ? 1 : 0;
  const over = value === null || (typeof cap === "number" && value > cap && tensor.status === "Fail");
  const fill = h("span", { class: over ? "fill over" : "fill" });
  fill.style.width = `${100 * share}%`;
  return h(
    "span",
    { class: "measured" },
    h("span", { class: over ? "value over" : "value" }, number(value)),
    h("span", { class: "cap" }, label),
    typeof cap === "number" ? h("span", { class: "gauge", "aria-hidden": "true" }, fill) : null,
  );
}
