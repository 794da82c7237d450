// A small line chart over the last two minutes: drawn as SVG, read with the pointer or the arrow keys.

import { h, svg } from "./dom.js";

export const SPAN = 120;
const GAP = 10;
const WIDTH = 300;
const HEIGHT = 60;

/** The least of 1, 2, 5, 10, 20 … times `unit` that is not below `value`. */
function ceiling(value, unit) {
  const least = Math.max(value, unit) / unit;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].find((one) => one * power >= least * (1 - 1e-9));
  return step * power * unit;
}

/**
 * `series` is a list of names, at most two, drawn in that order; `format` makes words of a value; the top of the scale is
 * `top`, or follows the data from `least` on; `none` stands for what is not known.
 */
export class Chart {
  #now;
  #points = [];
  #at = null;

  constructor(title, { series, format, top = null, least = 1, none = "–" }) {
    Object.assign(this, { title, series, format, top, least, none });
    this.values = series.map(() => h("b", {}, none));
    const legend = series.map((name, i) =>
      h("span", { class: "key" }, h("i", { class: `swatch s${i + 1}` }), name, " ", this.values[i]),
    );
    this.when = h("span", { class: "when" });
    this.lines = series.map((_, i) => svg("path", { class: `line s${i + 1}` }));
    this.area = svg("path", { class: "area" });
    this.dots = series.map((_, i) => svg("path", { class: `point s${i + 1}` }));
    this.cross = svg("path", { class: "cross" });
    this.highest = h("span", { class: "tick" });
    const grid = svg("path", { class: "grid", d: `M0 0.5H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - 0.5}H${WIDTH}` });
    this.plot = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      [grid, this.area, ...this.lines.toReversed(), this.cross, ...this.dots],
    );
    this.frame = h(
      "div",
      {
        class: "plot",
        tabindex: "0",
        role: "img",
        onpointermove: (event) => this.#point(event),
        onpointerleave: () => this.#read(null),
        onkeydown: (event) => this.#key(event),
        onblur: () => this.#read(null),
      },
      this.plot,
      this.highest,
      h("span", { class: "tick low" }, "0"),
    );
    this.element = h(
      "figure",
      { class: "chart" },
      h("figcaption", {}, h("span", { class: "title" }, title), this.when),
      h("div", { class: "legend" }, legend),
      this.frame,
      h("div", { class: "axis", "aria-hidden": "true" }, h("span", {}, "2 min ago"), h("span", {}, "now")),
    );
    this.draw(0, []);
  }

  /** `points` are `{time, values}` with a value or null for each series; `now` is the time at the right edge. */
  draw(now, points) {
    this.#now = now;
    this.#points = points;
    const all = points.flatMap((point) => point.values).filter((value) => value !== null);
    this.scale = this.top ?? ceiling(Math.max(0, ...all), this.least);
    this.highest.textContent = this.format(this.scale);
    this.series.forEach((_, i) => {
      const runs = this.#runs(i);
      const path = (run) => `${run.map(([x, y], n) => `${n ? "L" : "M"}${x} ${y}`).join("")}${run.length > 1 ? "" : "h0"}`;
      const down = (run) => `${path(run)}L${run.at(-1)[0]} ${HEIGHT}L${run[0][0]} ${HEIGHT}Z`;
      this.lines[i].setAttribute("d", runs.map(path).join(""));
      if (this.series.length === 1) this.area.setAttribute("d", runs.map(down).join(""));
    });
    this.#read(this.#at);
  }

  /** The drawn points of a series, cut where a value or some time is missing. */
  #runs(i) {
    const runs = [];
    let run = null;
    let last = 0;
    for (const { time, values } of this.#points) {
      if (time - last > GAP) run = null;
      last = time;
      if (values[i] === null) run = null;
      else {
        if (!run) runs.push((run = []));
        run.push([this.#x(time), this.#y(values[i])]);
      }
    }
    return runs;
  }

  #x = (time) => Number((WIDTH * (1 - (this.#now - time) / SPAN)).toFixed(1));
  #y = (value) => Number((HEIGHT - 1.5 - (HEIGHT - 3) * Math.min(value / this.scale, 1)).toFixed(1));

  #point(event) {
    const box = this.plot.getBoundingClientRect();
    const time = this.#now - SPAN * (1 - (event.clientX - box.left) / box.width);
    let nearest = null;
    for (const point of this.#points)
      if (nearest === null || Math.abs(point.time - time) < Math.abs(nearest - time)) nearest = point.time;
    this.#read(nearest);
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || this.#points.length === 0) return;
    event.preventDefault();
    const last = this.#points.length - 1;
    const index = this.#points.findIndex((point) => point.time === this.#at);
    this.#read(this.#points[Math.min(Math.max((index < 0 ? last : index) + step, 0), last)].time);
  }

  /** Show the values of one moment; null shows those of now. */
  #read(time) {
    const point = this.#points.find((one) => one.time === time) ?? null;
    this.#at = point && time;
    const shown = point ?? this.#points.at(-1) ?? null;
    const words = this.series.map((_, i) => {
      const value = shown?.values[i] ?? null;
      return value === null ? this.none : this.format(value);
    });
    words.forEach((text, i) => (this.values[i].textContent = text));
    this.when.textContent = point ? `${Math.round(this.#now - point.time)} s ago` : "";
    this.cross.setAttribute("d", point ? `M${this.#x(point.time)} 0V${HEIGHT}` : "");
    this.dots.forEach((dot, i) => {
      const value = point?.values[i] ?? null;
      dot.setAttribute("d", value === null ? "" : `M${this.#x(point.time)} ${this.#y(value)}h0`);
    });
    const moment = point ? this.when.textContent : "now";
    this.frame.setAttribute("aria-label", `${this.title}, ${moment}: ${this.series.map((name, i) => `${name} ${words[i]}`).join(", ")}`);
  }
}
