// What the server is doing, asked for each second while somebody looks.

import { ApiError, getJson } from "./api.js";
import { Chart, SPAN } from "./chart.js";
import { byId, count, number, percent, seconds } from "./dom.js";

const PERIOD = 1000;
const SLOWEST = 8000;
// Seconds that hit rates and latencies are taken over: long enough to hold a few requests.
const WINDOW = 15;

const tokens = (value) => `${number(value)}/s`;
const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
const latency = { format: seconds, least: 0.01, series: ["mean", "p95"] };

const charts = {
  requests: new Chart("Requests", { series: ["running", "waiting"], format: whole, least: 4 }),
  batch: new Chart("Batch", { series: ["tokens generated per step"], format: number, least: 4 }),
  generated: new Chart("Generated", { series: ["tokens"], format: tokens, least: 10 }),
  prompt: new Chart("Prompts", { series: ["tokens"], format: tokens, least: 10 }),
  cache: new Chart("Cache in use", {
    series: ["by running", "kept for later"],
    format: percent,
    top: 1,
  }),
  hits: new Chart("Cache hits", { series: ["of prompt tokens"], format: percent, top: 1 }),
  ttft: new Chart("Time to first token", latency),
  itl: new Chart("Time between tokens", latency),
};

/** Where `share` of a histogram's samples end: linear inside a bucket, and its last bound at most. */
export function quantile(bounds, counts, share) {
  const rank = share * counts.at(-1);
  const i = counts.findIndex((below) => below >= rank);
  if (i >= bounds.length) return bounds.at(-1);
  const [low, before] = i ? [bounds[i - 1], counts[i - 1]] : [0, 0];
  return low + ((bounds[i] - low) * (rank - before)) / (counts[i] - before);
}

/** Mean and 95th percentile of what was added to a histogram between two moments; nulls where nothing was. */
export function between(before, after) {
  const counts = after.counts.map((n, i) => n - before.counts[i]);
  const n = counts.at(-1);
  return n ? [(after.sum - before.sum) / n, quantile(after.bounds, counts, 0.95)] : [null, null];
}

/** The chart values of the last of `samples`, which are of one server and in order. */
export function values(samples) {
  const now = samples.at(-1);
  const previous = samples.at(-2) ?? now;
  const old = samples.find((one) => one.time >= now.time - WINDOW);
  const rate = (name) => (now.time === previous.time ? null : (now[name] - previous[name]) / (now.time - previous.time));
  const steps = now.steps - previous.steps;
  const asked = now.prefix_queries - old.prefix_queries;
  return {
    requests: [now.running, now.waiting],
    batch: [steps ? (now.generation_tokens - previous.generation_tokens) / steps : null],
    generated: [rate("generation_tokens")],
    prompt: [rate("prompt_tokens")],
    cache: [now.kv_usage, now.cached_usage],
    hits: [asked ? (now.prefix_hits - old.prefix_hits) / asked : null],
    ttft: between(old.latency.ttft, now.latency.ttft),
    itl: between(old.latency.itl, now.latency.itl),
  };
}

let samples = [];
let points = [];

function add(sample) {
  if (samples.at(-1)?.started !== sample.started) {
    samples = [];
    points = [];
  }
  samples.push(sample);
  points.push({ time: sample.time, of: values(samples) });
  const kept = (one) => one.time >= sample.time - SPAN;
  samples = samples.filter(kept);
  points = points.filter(kept);
  for (const [name, chart] of Object.entries(charts))
    chart.draw(
      sample.time,
      points.map(({ time, of }) => ({ time, values: of[name] })),
    );
  const hits = sample.prefix_queries ? `, ${percent(sample.prefix_hits / sample.prefix_queries)} of prompt tokens from the cache` : "";
  const refused = sample.refused ? `, ${count(sample.refused, "request")} refused` : "";
  byId("totals").textContent =
    `Since the start: ${count(sample.finished, "answer")}, ${count(sample.generation_tokens, "token")}${hits}${refused}`;
}

function absent(error) {
  if (error instanceof ApiError) return null;
  throw error;
}

/** Begin asking. `told` gets each answer, or null where there was none; the figures of a new server start afresh. */
export function watch(told) {
  byId("charts").append(...Object.values(charts).map((chart) => chart.element));
  byId("charts-note").textContent =
    `Latencies and cache hits are those of the ${WINDOW} s before each point; p95 is estimated within a histogram's bucket.`;
  let pause = PERIOD;
  let timer = 0;
  async function ask() {
    timer = 0;
    const sample = await getJson("page/live").catch(absent);
    pause = sample ? PERIOD : Math.min(2 * pause, SLOWEST);
    if (!document.hidden) timer = setTimeout(ask, pause);
    else asking = false;
    if (sample) add(sample);
    told(sample);
  }
  let asking = true;
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && !asking) {
      asking = true;
      ask();
    } else if (document.hidden && timer) {
      clearTimeout(timer);
      timer = 0;
      asking = false;
    }
  });
  ask();
}
