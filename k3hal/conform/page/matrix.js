// The matrix: operators by family down, providers (or backends) across, a button for every provider of an operator.

const MANY_PROVIDERS = 8;
const providerIds = [...new Set(cells.map((cell) => cell.provider))].sort();
const view = { columns: providerIds.length > MANY_PROVIDERS ? "backend" : "provider" };

const cellsOfOp = new Map();
for (const cell of cells) cellsOfOp.set(cell.op, [...(cellsOfOp.get(cell.op) ?? []), cell]);

/** Draw the matrix of what the filters leave; returns how many checks they leave. */
function drawMatrix(host) {
  const shown = new Map();
  let left = 0;
  const narrow = filtered();
  for (const cell of cells) {
    const list = narrow ? cell.rows.filter(matches) : cell.rows;
    if (narrow && list.length === 0) continue;
    shown.set(cell, list);
  }
  for (const row of allRows) left += matches(row) ? 1 : 0;
  const columns = [...new Set([...shown.keys()].map((cell) => cell[view.columns]))].sort(byBackend);
  if (columns.length === 0) host.replaceChildren(h("p", { class: "empty" }, "No operator matches."));
  else host.replaceChildren(matrixTable(columns, shown));
  return left;
}

const backendOf = Object.fromEntries(cells.map((cell) => [cell.provider, cell.backend]));
const groupOf = (column) => (view.columns === "backend" ? column : backendOf[column]);
const byBackend = (a, b) => groupOf(a).localeCompare(groupOf(b)) || a.localeCompare(b);

function matrixTable(columns, shown) {
  const bodies = Object.entries(report.families).map(([family, ops]) => familyBody(family, ops, columns, shown));
  return h(
    "div",
    { class: "scroll", role: "region", "aria-label": "Operators by providers", tabindex: "0" },
    h(
      "table",
      { class: `matrix by-${view.columns}`, onkeydown: moveInMatrix },
      h("caption", { class: "unseen" }, "Evidence level and checks passed, for every operator and provider"),
      matrixHead(columns),
      bodies.filter(Boolean),
    ),
  );
}

function matrixHead(columns) {
  if (view.columns === "backend") {
    return h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", { scope: "col" }, "Operator"),
        columns.map((name) => h("th", { scope: "col" }, name)),
      ),
    );
  }
  const groups = [];
  for (const column of columns) {
    if (groups.at(-1)?.[0] === groupOf(column)) groups.at(-1)[1] += 1;
    else groups.push([groupOf(column), 1]);
  }
  const short = (id) => (id.startsWith(`${groupOf(id)}.`) ? id.slice(groupOf(id).length + 1) : id);
  return h(
    "thead",
    {},
    h(
      "tr",
      {},
      h("th", { scope: "col", rowspan: "2" }, "Operator"),
      groups.map(([name, width]) => h("th", { scope: "colgroup", colspan: width, class: "group" }, name)),
    ),
    h(
      "tr",
      {},
      columns.map((id) => h("th", { scope: "col", title: id }, short(id))),
    ),
  );
}

function familyBody(family, ops, columns, shown) {
  const lines = [];
  for (const op of ops) {
    const mine = (cellsOfOp.get(op) ?? []).filter((cell) => shown.has(cell));
    if (mine.length === 0) continue;
    const cellsIn = (column) =>
      mine.filter((cell) => cell[view.columns] === column).map((cell) => cellButton(cell, shown.get(cell)));
    lines.push(
      h(
        "tr",
        {},
        h("th", { scope: "row" }, breakable(op)),
        columns.map((column) => h("td", {}, cellsIn(column))),
      ),
    );
  }
  if (lines.length === 0) return null;
  return h(
    "tbody",
    {},
    h("tr", { class: "family" }, h("th", { scope: "rowgroup", colspan: columns.length + 1 }, h("span", {}, family))),
    lines,
  );
}

/** A name that may break behind its underscores and dots. */
const breakable = (name) => name.split(/(?<=[_.])/).flatMap((part, i) => (i ? [h("wbr", {}), part] : [part]));

/** The level of a cell; with a filter on dtype or shape class, the lowest of what it leaves. */
function levelFor(cell) {
  if (!filter.dtype && !filter.shape_class) return cell.level;
  const left = cell.levels.filter(
    (one) =>
      (!filter.dtype || one.dtype === filter.dtype) && (!filter.shape_class || one.shape_class === filter.shape_class),
  );
  return left.map((one) => one.level).sort()[0] ?? cell.level;
}

function cellButton(cell, list) {
  const total = tally(list);
  const level = levelFor(cell);
  const warned = total.by.QualityWarning ?? 0;
  const waived = total.by.Waived ?? 0;
  const notes = [
    total.bad && [`${total.bad} failed`, "fail"],
    waived && [`${waived} waived`, "waived"],
    warned && [count(warned, "warning"), "warn"],
  ].filter(Boolean);
  const counted = cell.reference_only
    ? "reference only"
    : list.length === 0
      ? "no checks"
      : total.of === 0
        ? "not supported"
        : `${total.passed}/${total.of}`;
  const said = list.length === 0 || total.of === 0 ? counted : `${total.passed} of ${total.of} checks passed`;
  const name = view.columns === "backend" ? cell.provider.slice(cell.provider.indexOf(".") + 1) : null;
  const arch = cell.arch && view.archs > 1 ? cell.arch : null;
  const label = [
    `${cell.op}, ${cell.provider}`,
    arch,
    `level ${level || "not stated"}`,
    said,
    ...notes.map(([note]) => note),
  ]
    .filter(Boolean)
    .join(", ");
  return h(
    "button",
    {
      type: "button",
      class: `cell ${total.bad ? "bad" : ""}`,
      "aria-label": label,
      "aria-haspopup": "dialog",
      onclick: () => openCell(cell),
    },
    levelBadge(level),
    h(
      "span",
      { class: "what" },
      name ? h("span", { class: "name" }, name) : null,
      arch ? h("span", { class: "arch" }, arch) : null,
      h("span", { class: "count" }, counted),
    ),
    notes.map(([note, tone]) => h("span", { class: `note ${tone}` }, note)),
    total.of ? shareBar(total) : null,
  );
}
view.archs = new Set(cells.map((cell) => cell.arch)).size;

/** A bar of the parts that passed, passed with a warning, were waived and failed. */
function shareBar(total) {
  const parts = [
    [total.by.Pass ?? 0, "pass"],
    [total.by.QualityWarning ?? 0, "warn"],
    [total.by.Waived ?? 0, "waived"],
    [total.bad, "fail"],
  ];
  const bar = h("span", { class: "bar", "aria-hidden": "true" });
  for (const [size, tone] of parts) {
    if (!size) continue;
    const part = h("span", { class: tone });
    part.style.flexGrow = size;
    bar.append(part);
  }
  return bar;
}

/** Arrow keys go from button to button; Tab does too, in reading order. */
function moveInMatrix(event) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  const from = event.target.closest("button.cell");
  if (!step || !from) return;
  event.preventDefault();
  const grid = [...event.currentTarget.tBodies]
    .flatMap((body) => [...body.rows])
    .filter((row) => !row.classList.contains("family"));
  const within = [...from.parentElement.children];
  const beside = within[within.indexOf(from) + step[0]];
  if (beside) return beside.focus();
  let [y, x] = [grid.indexOf(from.closest("tr")), from.parentElement.cellIndex];
  for (;;) {
    [y, x] = [y + step[0], x + step[1]];
    const found = grid[y]?.cells[x]?.querySelectorAll("button.cell");
    if (!found) return;
    if (found.length) return found[step[0] < 0 ? found.length - 1 : 0].focus();
  }
}

/** For each backend, how many of its operators have which level at best. */
function coverage() {
  const judged = cells.filter((cell) => !cell.reference_only);
  const backends = new Map();
  for (const cell of judged) {
    const best = backends.get(cell.backend) ?? new Map();
    backends.set(cell.backend, best.set(cell.op, [best.get(cell.op) ?? "", cell.level].sort().at(-1)));
  }
  const lines = [...backends].sort().map(([backend, best]) => {
    const by = new Map();
    for (const level of [...best.values()].sort().reverse()) by.set(level, (by.get(level) ?? 0) + 1);
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, backend),
      h("td", { class: "n" }, count(best.size, "operator")),
      h("td", {}, levelsBar(by)),
    );
  });
  const head = ["Backend", "Operators", "Best level of each"].map((name) => h("th", { scope: "col" }, name));
  return h(
    "table",
    { class: "coverage" },
    h("caption", { class: "unseen" }, "Operators by best evidence level, for each backend"),
    h("thead", { class: "unseen" }, h("tr", {}, head)),
    h("tbody", {}, lines),
  );
}

function levelsBar(by) {
  const bar = h("span", { class: "levels" });
  for (const [level, size] of by) {
    const part = h(
      "span",
      { class: `level ${Object.hasOwn(LEVELS, level) ? level : "unknown"}` },
      `${level || "–"} `,
      h("b", {}, `× ${size}`),
    );
    part.style.flexGrow = size;
    bar.append(part);
  }
  return bar;
}
