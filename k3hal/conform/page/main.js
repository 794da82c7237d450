// Filters, and the first drawing.

const matrixHost = h("div", {});
const checksHost = h("div", {});
const found = h("p", { class: "found", role: "status" });
const controls = {};

function options(name, label) {
  const values = [...new Set(allRows.map((row) => text(row, name)))];
  values.sort((a, b) => (name === "status" ? SEVERITY.indexOf(a) - SEVERITY.indexOf(b) : a.localeCompare(b)));
  const choices = values.map((value) =>
    h("option", { value }, name === "status" ? statusOf(value).words : value || "none"),
  );
  controls[name] = h(
    "select",
    { onchange: () => filterTo({ [name]: controls[name].value }, false) },
    h("option", { value: "" }, "All"),
    choices,
  );
  return h("label", {}, label, controls[name]);
}

function filterBar() {
  let waiting = 0;
  const later = () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => filterTo({ search: controls.search.value.trim().toLowerCase() }, false), 120);
  };
  controls.search = h("input", {
    type: "search",
    placeholder: "operator, provider, case, problem",
    oninput: later,
    spellcheck: "false",
    autocomplete: "off",
  });
  controls.clear = h("button", { type: "button", onclick: clear }, "Clear filters");
  const columns = h(
    "select",
    { onchange: () => ((view.columns = columns.value), drawMatrix(matrixHost)) },
    ["backend", "provider"].map((name) => h("option", { value: name, selected: view.columns === name }, `${name}s`)),
  );
  return h(
    "form",
    { class: "filters", role: "search", "aria-label": "Filter checks", onsubmit: (event) => event.preventDefault() },
    h("label", { class: "grow" }, "Search", controls.search),
    options("status", "Status"),
    options("dtype", "dtype"),
    options("shape_class", "Shape class"),
    h("label", {}, "Columns", columns),
    controls.clear,
  );
}

function clear() {
  filterTo({ search: "", status: "", dtype: "", shape_class: "" }, false);
  controls.search.focus();
}

/** Set some filters and draw again; `jump` goes to the list of checks. */
function filterTo(change, jump = true) {
  Object.assign(filter, change);
  for (const name of ["status", "dtype", "shape_class"]) controls[name].value = filter[name];
  if (controls.search.value.trim().toLowerCase() !== filter.search) controls.search.value = filter.search;
  drawFiltered();
  if (jump) {
    byId("checks").scrollIntoView();
    byId("checks").focus({ preventScroll: true });
  }
}

function drawFiltered() {
  const left = drawMatrix(matrixHost);
  const all = allRows.length.toLocaleString("en");
  found.textContent = filtered() ? `${left.toLocaleString("en")} of ${all} checks match.` : `${all} checks.`;
  controls.clear.disabled = !filtered();
  showChecks(checksHost, filtered() ? allRows.filter(matches) : allRows, { caption: "Checks", full: true });
}

function legend() {
  const levels = Object.entries(LEVELS).map(([level, meaning]) =>
    h("div", {}, h("dt", {}, levelBadge(level)), h("dd", {}, meaning)),
  );
  return h("dl", { class: "legend", "aria-label": "Evidence levels" }, levels);
}

/** What the reader should know of this run before reading its levels. */
function remarks() {
  const bare = cells.filter((cell) => cell.reference_only).length;
  const notes = [
    report.selection.quick && "A quick run tries too little for E3: its levels end at E2.",
    bare && `${count(bare, "operator")} ${bare === 1 ? "has" : "have"} only the reference on this device.`,
  ].filter(Boolean);
  return notes.length ? h("p", { class: "remark" }, notes.join(" ")) : null;
}

drawHead();
drawFailures();
section("matrix", "Operators by providers", coverage(), legend(), remarks(), filterBar(), found, matrixHost);
drawEndToEnd();
drawWaivers();
section("checks", "All checks", checksHost);
drawEnvironment();
drawFiltered();
byId("foot").replaceChildren(
  h("p", {}, `${report.schema} · ${product} ${statement.version} · everything on this page is inside this file`),
);
openLinked();
addEventListener("hashchange", openLinked);
