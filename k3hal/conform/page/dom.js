// Elements and words. Text enters the page as text nodes only: nothing of the report is ever parsed as HTML.

/** An element: properties (`class`, `text`, `on*` listeners, else attributes), then children (nodes or text). */
function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "class") element.className = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** A property of the object itself: names come from the report, and `constructor` is one. */
const own = (object, name) => (Object.hasOwn(object, name) ? object[name] : undefined);

const byId = (id) => document.getElementById(id);

/** A measured number in three digits; null is what was not finite. */
function number(value) {
  if (value === null || value === undefined) return "not finite";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 0.001 && size < 10000 ? String(Number(value.toPrecision(3))) : value.toExponential(2);
}

function seconds(value) {
  if (value >= 120) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value >= 1) return `${number(value)} s`;
  return value >= 0.001 ? `${number(1000 * value)} ms` : `${number(1e6 * value)} µs`;
}

const count = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

/** How much of a cap is used, in per cent. */
function percent(share) {
  if (!Number.isFinite(share)) return "over";
  if (share >= 10) return "> 1000 %";
  return share > 0 && share < 0.001 ? "< 0.1 %" : `${number(100 * share)} %`;
}

/** Anything of the report whose form is free, in one line. */
function plain(value) {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value) && value.every((one) => typeof one === "string")) return value.join(", ");
  return typeof value === "string" ? value : JSON.stringify(value);
}

const STATUS = {
  Pass: { mark: "✓", tone: "pass", words: "Pass" },
  QualityWarning: { mark: "!", tone: "warn", words: "Quality warning" },
  Waived: { mark: "⚑", tone: "waived", words: "Waived" },
  NotSupported: { mark: "–", tone: "none", words: "Not supported" },
  Fail: { mark: "✕", tone: "fail", words: "Fail" },
  Crash: { mark: "✕", tone: "fail", words: "Crash" },
  Timeout: { mark: "✕", tone: "fail", words: "Timeout" },
};
const LEVELS = {
  E0: "declared, nothing proven",
  E1: "called, and gave outputs; some checks fail",
  E2: "every check of the quick subset passes",
  E3: "operator conformance on the device",
  E4: "end-to-end model on the device",
  E5: "performance measured on the device",
};

const statusOf = (name) => own(STATUS, name) ?? { mark: "?", tone: "none", words: name };

function statusBadge(name) {
  const { mark, tone, words } = statusOf(name);
  return h("span", { class: `status ${tone}` }, h("span", { class: "mark", "aria-hidden": "true" }, mark), words);
}

function levelBadge(level) {
  const known = Object.hasOwn(LEVELS, level);
  return h("span", { class: `level ${known ? level : "unknown"}`, title: known ? LEVELS[level] : null }, level || "–");
}

/** A table with a caption for screen readers. `columns`: [label, class]; `rows`: lists of cells, the first a header.
 * A last column that is empty throughout is left out. */
function table(caption, columns, rows) {
  if (rows.length && rows.every((row) => row.length === columns.length && row.at(-1) === "")) {
    return table(
      caption,
      columns.slice(0, -1),
      rows.map((row) => row.slice(0, -1)),
    );
  }
  const cell = (content, i) =>
    i === 0
      ? h("th", { scope: "row", class: columns[i][1] }, content)
      : h("td", { class: columns[i][1], "data-label": columns[i][0] }, content);
  return h(
    "div",
    { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
    h(
      "table",
      {},
      h("caption", { class: "unseen" }, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map(([label, kind]) => h("th", { scope: "col", class: kind }, label)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) => h("tr", {}, row.map(cell))),
      ),
    ),
  );
}

/** A command with a button that copies it, or selects it where the browser forbids copying. */
function command(text) {
  const code = h("code", {}, text);
  const button = h("button", { type: "button", class: "small", onclick: copy }, "Copy");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
  return h("div", { class: "command" }, code, button);
}
