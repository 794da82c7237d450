// Elements and words. Text enters the page as text nodes only: nothing is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [key, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** An element: attributes (`on*` are listeners), then children (nodes or text). */
export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);

export const svg = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

export const byId = (id) => document.getElementById(id);

export const count = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

/** Three significant digits, thousands as k. */
export function number(value) {
  if (value >= 10000) return `${Number((value / 1000).toPrecision(3)).toLocaleString("en")}k`;
  return Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 6 });
}

export function seconds(value) {
  if (value >= 90) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value >= 1) return `${number(value)} s`;
  return value >= 0.001 || value === 0 ? `${number(1000 * value)} ms` : `${number(1e6 * value)} µs`;
}

export const percent = (share) => `${number(100 * share)} %`;

/** A button that copies what `text()` says, or tells that the browser does not allow it. */
export function copyButton(text, label) {
  const button = h("button", { type: "button", class: "link", "aria-label": label, onclick: copy }, "Copy");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed here";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
  return button;
}
