// The drill-down: one cell of the matrix in a dialog, with a link of its own.

const dialog = byId("detail");
let ignoreFilter = false;

function openCell(cell) {
  ignoreFilter = false;
  fillDialog(cell);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  setLink(`#${new URLSearchParams({ op: cell.op, provider: cell.provider })}`);
}

function setLink(hash) {
  history.replaceState(null, "", hash || location.pathname + location.search);
}

/** Open the cell that the address names, if there is one. */
function openLinked() {
  const named = new URLSearchParams(location.hash.slice(1));
  const cell = cells.find((one) => one.op === named.get("op") && one.provider === named.get("provider"));
  if (cell) openCell(cell);
}

function fillDialog(cell) {
  const total = tally(cell.rows);
  const host = h("div", {});
  const list = ignoreFilter ? cell.rows : cell.rows.filter(matches);
  const facts = [
    cell.arch && `architecture ${cell.arch}`,
    cell.source_hash && `source ${String(cell.source_hash).slice(0, 12)}`,
  ];
  dialog.replaceChildren(
    h(
      "div",
      { class: "sheet-head" },
      h(
        "div",
        {},
        h("h2", { id: "detail-title" }, h("span", {}, cell.op), h("span", { class: "by" }, cell.provider)),
        h(
          "p",
          { class: "under" },
          levelBadge(cell.level),
          h("span", {}, LEVELS[cell.level] ?? "no level stated"),
          ...facts.filter(Boolean).map((fact) => h("span", { class: "fact" }, fact)),
        ),
      ),
      h("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => dialog.close() }, "✕"),
    ),
    h(
      "div",
      { class: "sheet-body" },
      statusLine(total),
      evidenceByClass(cell),
      timings(cell),
      refusals(cell),
      h("h3", {}, "Checks"),
      filterNote(cell, list),
      host,
    ),
  );
  const failures = list.some((row) => BAD.includes(text(row, "status")));
  if (cell.rows.length === 0)
    host.replaceChildren(
      h(
        "p",
        { class: "empty" },
        cell.reference_only
          ? "No provider here has this operator: the reference runs."
          : "No check ran for this provider.",
      ),
    );
  else showChecks(host, list, { caption: `Checks of ${cell.op} by ${cell.provider}`, open: failures });
}

function statusLine(total) {
  const found = SEVERITY.filter((name) => total.by[name]);
  return h(
    "p",
    { class: "tallies" },
    h("strong", {}, `${total.passed} of ${total.of} passed`),
    found.map((name) => h("span", {}, statusBadge(name), ` ${total.by[name]}`)),
  );
}

function evidenceByClass(cell) {
  if (cell.levels.length === 0) return null;
  const columns = [
    ["dtype"],
    ["Shape class"],
    ["Level"],
    ["Passed", "n"],
    ["Worst tensor", "n"],
    ["Slice", "n"],
    ["Peak", "n"],
    ["Peer ratio", "n"],
  ];
  const lines = cell.levels.map((level) => {
    const { worst } = level;
    const ratio = worst.peer_ratio;
    const value = (name) => number(worst[name]);
    const passed = h(
      "span",
      { class: level.passed < level.of ? "value over" : "value" },
      `${level.passed}/${level.of}`,
    );
    const badge = levelBadge(level.level);
    return [
      level.dtype,
      level.shape_class,
      badge,
      passed,
      value("tensor"),
      value("slice"),
      value("peak"),
      typeof ratio === "number" ? `${number(ratio)} ×` : "–",
    ];
  });
  return [h("h3", {}, "Evidence"), table(`Evidence of ${cell.op} by ${cell.provider}`, columns, lines)];
}

function refusals(cell) {
  if (cell.refusals.length === 0) return null;
  return [
    h("h3", {}, "What it refuses"),
    h(
      "ul",
      { class: "plain" },
      cell.refusals.map((refusal) => h("li", {}, refusalText(refusal))),
    ),
  ];
}

function refusalText({ dtype, phase, reasons, cases: refused }) {
  return `${dtype}, ${phase}: ${reasons.map(plain).join("; ")} (${count(refused.length, "case")})`;
}

/** Measured speed, where the run measured any. */
function timings(cell) {
  if (!cell.timings?.length) return null;
  const columns = [["Case"], ["dtype"], ["Time", "n"], ["Of the roofline", "n"], ["Best peer"], ["Its time", "n"]];
  const time = (value) => (typeof value === "number" ? seconds(value) : "not timed");
  const lines = cell.timings.map((one) => [
    h("code", {}, plain(one.case)),
    plain(one.dtype),
    time(one.seconds),
    typeof one.roofline === "number" ? `${number(100 * one.roofline)} %` : "–",
    one.peer ? h("code", {}, plain(one.peer.provider)) : "–",
    one.peer ? time(one.peer.seconds) : "–",
  ]);
  return [h("h3", {}, "Speed"), table(`Speed of ${cell.op} by ${cell.provider}`, columns, lines)];
}

function filterNote(cell, list) {
  const hidden = cell.rows.length - list.length;
  if (hidden === 0) return null;
  const all = () => {
    ignoreFilter = true;
    fillDialog(cell);
    dialog.querySelector(".close").focus();
  };
  return h(
    "p",
    { class: "notice" },
    `The page's filters hide ${count(hidden, "check")} here. `,
    h("button", { type: "button", class: "small", onclick: all }, "Show all"),
  );
}

dialog.addEventListener("close", () => {
  setLink("");
  dialog.replaceChildren();
});
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close();
});
