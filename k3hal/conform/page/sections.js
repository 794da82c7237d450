// Everything around the matrix: the head, failures, end to end, waivers, environment.

const statement = report.statement;
const device = report.device;
const deviceName = device.title || device.device;
const product = statement.product === "k3hal" ? "K3HAL" : statement.product;

function drawHead() {
  const total = tally(allRows);
  const commit = statement.commit;
  const tree = statement.dirty
    ? h("span", { class: "flag warn" }, "dirty tree")
    : h("span", { class: "flag pass" }, "clean tree");
  const facts = [
    ["Device", deviceName],
    ["Version", statement.version],
    ["Commit", h("span", {}, h("code", { title: commit }, commit.slice(0, 12) || "unknown"), " ", tree)],
    ...(report.packages ?? []).map((one) => [
      `Backend ${one.backend}`,
      h("span", {}, `${one.name} ${one.version} `, h("code", { title: one.commit }, one.commit.slice(0, 12)), one.dirty
        ? h("span", { class: "flag warn" }, "dirty tree") : ""),
    ]),
    [
      "Must-pass list",
      h(
        "span",
        {},
        `${count(report.must_pass.count, "check")} `,
        h("code", { title: report.must_pass.hash }, report.must_pass.hash.slice(0, 12)),
      ),
    ],
    ["Selection", selected()],
    ["Made", moment(statement.created)],
    ["Took", seconds(report.seconds)],
  ];
  byId("top").append(
    h(
      "div",
      { class: "title" },
      h(
        "div",
        {},
        h("p", { class: "eyebrow" }, "Conformance report"),
        h("h1", {}, product, h("span", { class: "on" }, ` on ${deviceName}`)),
      ),
      themeButton(),
    ),
    verdict(total),
    ...(statement.dirty || (report.packages ?? []).some((one) => one.dirty) ? [dirtyNotice()] : []),
    h(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
    ),
  );
}

const dirtyNotice = () =>
  h(
    "p",
    { class: "notice warn" },
    "Made from a tree with uncommitted changes: ",
    h("code", {}, "k3hal conform verify"),
    " rejects this package, and nothing here counts as evidence.",
  );

/** `2026-11-30T01:00:00Z` as `2026-11-30 01:00 UTC`; anything else as it is. */
const moment = (value) => value.replace(/^(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(?::[\d.]+)?(?:Z|\+00:00)$/, "$1 $2 UTC");

function selected() {
  const { backend, device: machine, ops, quick } = report.selection;
  const what = ops === "*" ? "all operators" : `operators ${ops}`;
  return [quick ? "quick" : "full", what, backend && `backend ${backend}`, `device ${machine}`]
    .filter(Boolean)
    .join(", ");
}

function verdict(total) {
  const tone = total.bad ? "fail" : total.of === 0 ? "none" : "pass";
  const says = total.of === 0 ? "No check ran" : total.bad ? `${count(total.bad, "check")} failed` : "No check failed";
  const tiles = SEVERITY.filter((name) => total.by[name]).map((name) =>
    h(
      "button",
      {
        type: "button",
        class: `tile ${statusOf(name).tone}`,
        "aria-label": `${count(total.by[name], "check")}: ${statusOf(name).words}. Show them`,
        onclick: () => filterTo({ status: name }),
      },
      h("strong", {}, total.by[name].toLocaleString("en")),
      h("span", {}, statusOf(name).words),
    ),
  );
  const share = `${total.passed.toLocaleString("en")} of ${total.of.toLocaleString("en")} passed`;
  const reach = `${count(new Set(cells.map((cell) => cell.op)).size, "operator")}, ${count(providerIds.length, "provider")}`;
  return h(
    "div",
    { class: `verdict ${tone}` },
    h("div", { class: "says" }, h("strong", {}, says), h("span", {}, `${share} · ${reach}`)),
    h("div", { class: "tiles" }, tiles),
  );
}

function themeButton() {
  const dark = () =>
    (document.documentElement.dataset.theme ??
      (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const button = h("button", { type: "button", class: "small theme", onclick: flip });
  const name = () => (button.textContent = dark() ? "Light" : "Dark");
  function flip() {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    name();
  }
  button.setAttribute("aria-label", "Switch between light and dark");
  name();
  return button;
}

function section(id, title, ...content) {
  const host = byId(id);
  host.replaceChildren(h("h2", { id: `${id}-title` }, title), ...content.flat().filter(Boolean));
  host.hidden = false;
}

function drawFailures() {
  if (failedRows.length === 0) return;
  const host = h("div", {});
  const by = new Map();
  for (const row of failedRows) {
    const name = `${text(row, "op")} by ${text(row, "provider")}`;
    by.set(name, (by.get(name) ?? 0) + 1);
  }
  const where = [...by].map(([name, n]) => `${name} (${n})`);
  const summary = where.slice(0, 6).join(", ") + (where.length > 6 ? ` and ${where.length - 6} more` : "");
  section("failures", `Failures (${failedRows.length.toLocaleString("en")})`, h("p", { class: "lead" }, summary), host);
  showChecks(host, failedRows, { caption: "Failed checks", full: true });
}

function drawEndToEnd() {
  const results = report.end_to_end;
  const note = h("p", { class: "lead" }, "Logits of a whole model against the same model in the reference precision.");
  if (results.length === 0) return section("end-to-end", "End to end", h("p", { class: "empty" }, "Not run."));
  const numbers = [
    ["Top-1 agreement", "n"],
    ["KL mean", "n"],
    ["KL max", "n"],
    ["RMS", "n"],
  ];
  const columns = [
    ["Model"],
    ["dtype"],
    ["Providers"],
    ["Status"],
    ...numbers,
    ["Operators run", "n"],
    ["Dispatch plan"],
    ["Why", "why"],
  ];
  const lines = results.map((one) => [
    one.preset,
    one.dtype,
    one.variant ?? "default",
    statusBadge(one.status),
    typeof one.top1 === "number" ? `${number(100 * one.top1)} %` : "–",
    ...["kl_mean", "kl_max", "rms"].map((name) => (one[name] === null ? "–" : number(one[name]))),
    String(one.ran.length),
    one.plan ? h("code", {}, plain(one.plan)) : "–",
    one.problem,
  ]);
  return section("end-to-end", "End to end", note, table("End-to-end results", columns, lines));
}

function drawWaivers() {
  const waivers = report.waivers;
  if (waivers.length === 0)
    return section("waivers", "Waivers", h("p", { class: "empty" }, "None: every result stands as measured."));
  const columns = [
    ["Waiver"],
    ["Operator"],
    ["Provider"],
    ["Case"],
    ["Issue", "why"],
    ["Expires"],
    ["Used", "n"],
    ["Problem", "why"],
  ];
  const lines = waivers.map((one) => [
    h("code", {}, one.id),
    one.op,
    h("code", {}, one.provider),
    h("code", {}, one.case),
    issueLink(one.issue),
    expiry(one.expires),
    one.used ? "yes" : h("span", { class: "flag warn" }, "unused"),
    one.problem,
  ]);
  return section("waivers", `Waivers (${waivers.length})`, table("Waivers", columns, lines));
}

const issueLink = (url) => (/^https?:\/\//.test(url) ? h("a", { href: url, rel: "noreferrer noopener" }, url) : url);

/** A date, flagged against the day the report was made: a page says the same whenever it is read. */
function expiry(date) {
  const days = Math.round((Date.parse(date) - Date.parse(statement.created.slice(0, 10))) / 86400000);
  if (!Number.isFinite(days)) return date;
  if (days < 0) return h("span", {}, date, " ", h("span", { class: "flag fail" }, "expired"));
  return h(
    "span",
    {},
    date,
    " ",
    h("span", { class: days < 31 ? "flag warn" : "flag" }, `${days} days after this report`),
  );
}

const RULE =
  "Errors are RMS over the RMS of the golden: of the whole tensor, of its worst row or column, and of the single worst " +
  "element (peak). A check passes within every cap, what rounding the golden costs allowed for, and at no more than " +
  "twice the largest of that rounding, the floor and the error of its peer, the CPU provider; up to four times is a " +
  "quality warning. Where a cap grows with the length of a sequence, the table has its smallest value.";

function drawEnvironment() {
  const pairs = (title, object) => {
    const lines = Object.entries(object).map(([name, value]) => [name, h("span", { class: "any" }, plain(value))]);
    const body = lines.length ? table(title, [["Name"], ["Value", "why"]], lines) : h("p", { class: "empty" }, "None.");
    return h("div", {}, h("h3", {}, title), body);
  };
  const columns = [["Class"], ["Floor", "n"], ["Tensor", "n"], ["Slice", "n"], ["Peak", "n"]];
  const limits = Object.entries(classes).map(([name, one]) => [
    h("code", {}, name),
    ...["floor", "tensor", "slice", "peak"].map((key) =>
      one.exact ? "bit-exact" : one[key] === null ? "no cap" : number(one[key]),
    ),
  ]);
  const hash = report.policy.hash;
  section(
    "environment",
    "Environment and policy",
    h(
      "div",
      { class: "pairs" },
      pairs("Device", device),
      pairs("Versions", report.versions),
      pairs("Variables", report.env),
    ),
    h("h3", {}, "Tolerance policy ", hash ? h("code", { class: "quiet" }, hash.slice(0, 12)) : null),
    h("p", { class: "lead" }, RULE),
    table("Caps of each tolerance class", columns, limits),
  );
}
