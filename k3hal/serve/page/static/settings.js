// What the chat sends beside the messages. Kept until the tab closes, so that a reload loses nothing.

import { byId, h } from "./dom.js";
import { checkedTools } from "./json.js";

const STORE = "k3hal.settings";
const EXAMPLE = `[
  {
    "type": "function",
    "function": {
      "name": "get_weather",
      "description": "The weather in a city.",
      "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"]
      }
    }
  }
]`;

const fields = {};
const problem = h("p", { class: "problem", role: "alert" });

function labelled(label, field, wide = false) {
  return h("label", { class: wide ? "wide" : null }, h("span", {}, label), field);
}

function numberField(placeholder, options) {
  return h("input", { type: "number", inputmode: "decimal", placeholder, ...options });
}

function effortField({ enabled, effort, efforts }) {
  const standard = enabled ? (effort ?? "on") : "off";
  return h(
    "select",
    {},
    h("option", { value: "" }, `Default (${standard})`),
    h("option", { value: "off" }, "Off"),
    efforts.map((name) => h("option", { value: name }, name[0].toUpperCase() + name.slice(1))),
  );
}

/** Build the form from `page/about`, with what this tab has set before. */
export function drawSettings(about) {
  const before = Object.keys(fields).length ? current() : stored();
  Object.assign(fields, {
    system: h("textarea", { rows: "3", placeholder: "None" }),
    model: h("select", {}, about.models.map((name) => h("option", { value: name }, name))),
    thinking: effortField(about.thinking),
    temperature: numberField(`${about.sampling.temperature} (default)`, { min: "0", max: "2", step: "0.05" }),
    max_tokens: numberField("Until it ends", { min: "1", step: "1" }),
    tools: h("textarea", { rows: "6", class: "code", spellcheck: "false", placeholder: "None: a JSON list, as in the API's “tools”" }),
    key: byId("key"),
  });
  for (const [name, field] of Object.entries(fields)) {
    if (before[name] !== undefined) field.value = before[name];
    if (field.tagName === "SELECT" && field.selectedIndex < 0) field.selectedIndex = 0; // no longer offered
    field.oninput = changed;
  }
  const example = h("button", { type: "button", class: "link", onclick: insertExample }, "Insert an example");
  byId("settings").replaceChildren(
    labelled("System prompt", fields.system, true),
    labelled("Thinking", fields.thinking),
    labelled("Temperature", fields.temperature),
    labelled("Max tokens", fields.max_tokens),
    about.models.length > 1 ? labelled("Model", fields.model) : "",
    h("div", { class: "wide tools" }, labelled("Tools", fields.tools), example, problem),
  );
  changed();
}

function insertExample() {
  fields.tools.value = EXAMPLE;
  changed();
}

const current = () => Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.value]));

function stored() {
  try {
    const value = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    return value !== null && typeof value === "object" ? value : {};
  } catch {
    return {}; // a browser that keeps nothing: the form begins empty
  }
}

function changed() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(current()));
  } catch {
    // A browser that keeps nothing: the form still works.
  }
  problem.textContent = settingsProblem()?.words ?? "";
  const set = [
    fields.system.value.trim() && "system prompt",
    fields.thinking.value && `thinking ${fields.thinking.value}`,
    fields.temperature.value && `temperature ${fields.temperature.value}`,
    fields.max_tokens.value && `${fields.max_tokens.value} tokens`,
    fields.tools.value.trim() && "tools",
  ].filter(Boolean);
  byId("settings-button").textContent = set.length ? `Settings: ${set.join(", ")}` : "Settings";
}

/** The first setting that is wrong and what is, as `{field, words}`; null when all are right. */
function settingsProblem() {
  const wrong = [fields.temperature, fields.max_tokens].find((field) => !field.checkValidity());
  if (wrong) return { field: wrong, words: `${wrong.parentElement.firstChild.textContent}: ${wrong.validationMessage}` };
  try {
    checkedTools(fields.tools.value);
    return null;
  } catch (error) {
    return { field: fields.tools, words: error.message };
  }
}

/** Whether a request can be made of the settings; if not, they are shown with what is wrong. */
export function settingsReady() {
  if (Object.keys(fields).length === 0) return false; // the server has not said yet what it serves
  const found = settingsProblem();
  if (!found) return true;
  toggleSettings(true);
  found.field.focus();
  return false;
}

export const apiKey = () => fields.key?.value.trim() ?? "";

/** The request as JSON text. Tools go in as they were typed: a parser would change number literals. */
export function requestBody(messages) {
  const { system, model, thinking, temperature, max_tokens: limit, tools } = current();
  const body = {
    model,
    messages: system.trim() ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (thinking === "off") body.thinking = { type: "disabled" };
  else if (thinking) body.thinking = { type: "enabled", effort: thinking };
  if (temperature) body.temperature = Number(temperature);
  if (limit) body.max_tokens = Number(limit);
  const text = JSON.stringify(body);
  return checkedTools(tools)?.length ? `${text.slice(0, -1)},"tools":${tools}}` : text;
}

/** Show the form, or hide it. */
export function toggleSettings(open = byId("settings").hidden) {
  byId("settings").hidden = !open;
  byId("settings-button").setAttribute("aria-expanded", String(open));
  if (open) fields.system?.focus();
}
