// The report: rows become checks when they are asked for, and cells group them by operator and provider.

const report = JSON.parse(byId("data").textContent);
const { strings, rows } = report;
const classes = report.policy.classes;
const COLUMN = Object.fromEntries(report.texts.map((name, i) => [name, i]));
const [SECONDS, PROBLEMS, TENSORS, COMMANDS] = [0, 1, 2, 3].map((i) => report.texts.length + i);
const BAD = ["Crash", "Timeout", "Fail"];
const OK = ["Pass", "QualityWarning"];

const text = (row, name) => strings[rows[row][COLUMN[name]]];

/** Check number `row` in full. */
function checkAt(row) {
  const values = rows[row];
  const check = { row, seconds: values[SECONDS] };
  for (const name of report.texts) check[name] = text(row, name);
  check.problems = values[PROBLEMS].map((i) => strings[i]);
  check.commands = values[COMMANDS].map((i) => strings[i]);
  check.tensors = values[TENSORS].map(tensorOf);
  return check;
}

function tensorOf([name, tolerance, status, tensor, slice, peak, peer, problem]) {
  const caps = own(classes, strings[tolerance]);
  return {
    name: strings[name],
    tolerance: strings[tolerance],
    status: strings[status],
    numbers: { tensor, slice, peak },
    peer,
    problem: strings[problem],
    caps,
    ratio: ratioToPeer(tensor, peer, caps, strings[status]),
  };
}

/** Against the peer's error, or the class's floor where that is larger or there is no peer; null where neither judged:
 * what passed far above the floor and without a peer was judged by its caps alone. */
function ratioToPeer(tensor, peer, caps, status) {
  if (tensor === null || !caps) return null;
  const least = Math.max(peer ?? 0, caps.floor ?? 0);
  const ratio = least > 0 ? tensor / least : null;
  return peer === null && status === "Pass" && ratio > 2 ? null : ratio;
}

/** The largest of the numbers over their caps, of all outputs; Infinity for what is not finite. */
function nearness(row) {
  let most = 0;
  for (const [, tolerance, , ...values] of rows[row][TENSORS]) {
    const caps = own(classes, strings[tolerance]);
    if (!caps) continue;
    ["tensor", "slice", "peak"].forEach((name, i) => {
      const value = values[i];
      if (value === null) most = Infinity;
      else if (caps.exact) most = Math.max(most, value === 0 ? 0 : Infinity);
      else if (caps[name]) most = Math.max(most, value / caps[name]);
    });
  }
  return most;
}

/** One cell of the matrix for each (operator, provider, architecture), those without checks included. */
function buildCells() {
  const cells = [];
  const found = new Map();
  const key = (op, provider) => JSON.stringify([op, provider]);
  for (const entry of report.providers) {
    const cell = { ...entry, rows: [] };
    cells.push(cell);
    found.set(key(cell.op, cell.provider), [...(found.get(key(cell.op, cell.provider)) ?? []), cell]);
  }
  for (let row = 0; row < rows.length; row++) {
    const [op, provider] = [text(row, "op"), text(row, "provider")];
    if (!found.has(key(op, provider))) {
      const backend = provider.includes(".") ? provider.split(".")[0] : provider;
      const cell = { op, provider, backend, arch: "", level: "", levels: [], refusals: [], rows: [] };
      cells.push(cell);
      found.set(key(op, provider), [cell]);
    }
    for (const cell of found.get(key(op, provider))) cell.rows.push(row);
  }
  return cells;
}

const cells = buildCells();
const allRows = rows.map((_, row) => row);
const failedRows = allRows.filter((row) => BAD.includes(text(row, "status")));

/** How many of some checks have each status, and `passed` of `of`: what was not supported did not run. */
function tally(list) {
  const by = {};
  for (const row of list) by[text(row, "status")] = (by[text(row, "status")] ?? 0) + 1;
  const sum = (names) => names.reduce((total, name) => total + (by[name] ?? 0), 0);
  return { by, passed: sum(OK), of: list.length - sum(["NotSupported"]), bad: sum(BAD) };
}

const filter = { search: "", status: "", dtype: "", shape_class: "" };

function matches(row) {
  for (const name of ["status", "dtype", "shape_class"]) {
    if (filter[name] && text(row, name) !== filter[name]) return false;
  }
  return filter.search === "" || words(row).includes(filter.search);
}

const searchable = new Map();

/** What the search looks at, lower case: names, kind, problems. */
function words(row) {
  let found = searchable.get(row);
  if (found === undefined) {
    const problems = rows[row][PROBLEMS].map((i) => strings[i]);
    const tensors = rows[row][TENSORS].map((tensor) => strings[tensor.at(-1)]);
    const names = ["op", "provider", "case", "kind", "phase", "waiver"].map((name) => text(row, name));
    found = [...names, ...problems, ...tensors].join("\n").toLowerCase();
    searchable.set(row, found);
  }
  return found;
}

const filtered = () => Object.values(filter).some((value) => value !== "");
