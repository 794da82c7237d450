// Puts the page together: its head, and what each part is told.

import { getJson, ApiError } from "./api.js";
import { openChat } from "./chat.js";
import { byId, h } from "./dom.js";
import { watch } from "./live.js";
import { drawPlan } from "./plan.js";
import { drawSettings } from "./settings.js";

const STATUS = {
  ready: ["good", "Ready"],
  starting: ["busy", "Warming up"],
  draining: ["busy", "Shutting down"],
  dead: ["bad", "Engine failed"],
  away: ["bad", "No answer"],
};
const TROUBLE = {
  starting: "The server is warming up: the first answer may take a while.",
  draining: "The server is shutting down: it finishes what runs and takes nothing new.",
  dead: "The engine has failed. The server's log says why; it has to be started again.",
  away: "The server does not answer. This page keeps asking and goes on when it is back.",
};

let known = null; // what `page/about` said, of the server that runs now

function showStatus(name) {
  const [tone, words] = STATUS[name];
  const pill = byId("status");
  if (pill.dataset.name === name) return;
  pill.dataset.name = name;
  pill.className = `status ${tone}`;
  pill.querySelector(".words").textContent = words;
  const trouble = byId("trouble");
  trouble.textContent = TROUBLE[name] ?? "";
  trouble.className = `notice ${tone}`;
  trouble.hidden = !TROUBLE[name];
}

async function learn() {
  const about = await getJson("page/about");
  const context = about.limits.max_model_len.toLocaleString("en");
  document.title = `${about.models[0]} · K3HAL`;
  byId("model").textContent = `serves ${about.models[0]}`;
  byId("facts").replaceChildren(
    ...[`version ${about.version}`, about.device, `context ${context}`, `up to ${about.limits.max_num_seqs} at once`].map((fact) =>
      h("span", {}, fact),
    ),
  );
  drawSettings(about);
  drawPlan(about);
  known = about;
}

async function told(sample) {
  showStatus(sample?.status ?? "away");
  byId("live").classList.toggle("stale", !sample);
  if (!sample) return;
  if (sample.needs_key) byId("key-form").hidden = false;
  if (known?.started === sample.started) return;
  try {
    await learn();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error; // else it has gone again, and the next figures tell
  }
}

function themeButton() {
  const button = byId("theme");
  const dark = () =>
    (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => (button.textContent = dark() ? "Light" : "Dark");
  button.setAttribute("aria-label", "Switch between light and dark");
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  name();
}

themeButton();
openChat();
watch(told);
