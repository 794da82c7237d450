// One turn of the conversation on the page. The model's text is shown exactly as it came: nothing in it is markup here.

import { copyButton, count, h, number, seconds } from "./dom.js";
import { indented, isJson } from "./json.js";

const ENDS = {
  length: "cut off at the limit of tokens",
  content_filter: "cut off by a filter",
};

export function userTurn(text) {
  return h("article", { class: "turn user", "aria-label": "You" }, h("div", { class: "text" }, text));
}

export function resultTurn(name, text) {
  return h(
    "article",
    { class: "turn result", "aria-label": `Result of ${name}` },
    h("p", { class: "who" }, "Result of ", h("code", {}, name)),
    h("pre", {}, text || "(empty)"),
  );
}

const BLOCK = 4000;

/** A text that grows; `shown` appears with its first piece. It stands in blocks of lines, so that a piece more of a long
 * text is laid out without the rest; where two blocks meet there is a line break that no block holds. */
class Growing {
  #node = null;
  constructor(host, shown = host) {
    this.host = host;
    this.shown = shown;
    this.text = "";
    this.#begin();
    shown.hidden = true;
  }
  add(piece) {
    this.text += piece;
    this.shown.hidden = false;
    const end = this.#node.length < BLOCK ? -1 : piece.indexOf("\n");
    if (end >= 0) {
      this.#node.appendData(piece.slice(0, end));
      this.#begin();
    }
    this.#node.appendData(piece.slice(end + 1));
  }
  #begin() {
    this.#node = document.createTextNode("");
    this.host.append(h("div", {}, this.#node));
  }
}

/** A tool call as it is written, and a box for what the tool answers. */
class Call {
  constructor(delta) {
    this.id = delta.id ?? "";
    this.name = delta.function?.name ?? "";
    this.raw = "";
    this.code = h("pre", { class: "arguments" });
    this.answer = h("textarea", { rows: "2", class: "code", placeholder: "What the tool answers" });
    this.box = h("label", { class: "reply", hidden: true }, h("span", {}, "Result"), this.answer);
    this.element = h(
      "div",
      { class: "call", role: "group", "aria-label": `Call of ${this.name}` },
      h("p", { class: "who" }, "Calls ", h("code", {}, this.name), h("span", { class: "id" }, this.id), copyButton(() => this.raw, "Copy the arguments")),
      this.code,
      this.box,
    );
  }
  add(piece) {
    this.raw += piece;
    this.code.textContent = this.raw;
  }
  /** Lay out what was written. Arguments that were cut off can neither be answered nor sent back. */
  close() {
    this.whole = isJson(this.raw);
    this.code.textContent = indented(this.raw);
    if (!this.whole) this.element.append(h("p", { class: "end" }, "Not whole, so not part of the conversation"));
  }
  /** Ask for the result; Ctrl+Enter in it is `send`. */
  answerable(send) {
    this.box.hidden = false;
    this.answer.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
    });
  }
  get message() {
    return { id: this.id, type: "function", function: { name: this.name, arguments: this.raw } };
  }
}

/** An answer of the model while it comes and after. */
export class AnswerTurn {
  #begun = performance.now();
  #first = 0;
  #last = 0;
  #thoughtUntil = 0;
  #finish = null;
  #usage = null;

  constructor() {
    this.summary = h("span", {}, "Thinking");
    const thoughts = h("div", { class: "text" });
    const thinking = h("details", { class: "thinking" }, h("summary", {}, this.summary), thoughts);
    const content = h("div", { class: "text" });
    this.reasoning = new Growing(thoughts, thinking);
    this.content = new Growing(content);
    this.calls = new Map(); // by their index in the answer
    this.callsHost = h("div", { class: "calls" });
    this.wait = h("p", { class: "wait" }, "Waiting for the first token");
    this.foot = h("div", { class: "foot" });
    this.element = h(
      "article",
      { class: "turn answer thinks", "aria-label": "Model" },
      thinking,
      content,
      this.callsHost,
      this.wait,
      this.foot,
    );
  }

  /** Take a chunk of the stream. */
  add(chunk) {
    if (chunk.usage) this.#usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    if (choice.usage) this.#usage = choice.usage;
    const { reasoning_content: thought, content, tool_calls: calls } = choice.delta ?? {};
    if (thought || content || calls?.length) this.#token();
    if (thought) this.reasoning.add(thought);
    if (content || calls?.length) this.#thought();
    if (content) this.content.add(content);
    for (const delta of calls ?? []) this.#call(delta);
    if (choice.finish_reason) this.#finish = choice.finish_reason;
  }

  #token() {
    this.#last = performance.now();
    this.#first ||= this.#last;
    this.wait.hidden = true;
  }

  #thought() {
    if (this.#thoughtUntil) return;
    this.#thoughtUntil = this.#last;
    this.element.classList.remove("thinks");
    this.summary.textContent = `Thought for ${seconds((this.#thoughtUntil - this.#first) / 1000)}`;
  }

  #call(delta) {
    if (!this.calls.has(delta.index)) {
      this.calls.set(delta.index, new Call(delta));
      this.callsHost.append(this.calls.get(delta.index).element);
    }
    if (delta.function?.arguments) this.calls.get(delta.index).add(delta.function.arguments);
  }

  /** Say how long it has been waiting or thinking. */
  tick() {
    const now = performance.now();
    const since = (from) => (now - from > 1500 ? ` for ${Math.round((now - from) / 1000)} s` : "");
    if (!this.#first) this.wait.textContent = `Waiting for the first token${since(this.#begun)}`;
    else if (!this.#thoughtUntil) this.summary.textContent = `Thinking${since(this.#first)}`;
  }

  /** No more chunks come; `end` says why where the model did not end by itself. */
  close(end = ENDS[this.#finish] ?? "") {
    this.wait.hidden = true;
    for (const call of this.calls.values()) call.close();
    this.#thought();
    const thoughts = this.#usage?.completion_tokens_details?.reasoning_tokens;
    if (thoughts) this.summary.append(`, ${count(thoughts, "token")}`);
    if (this.#finish === "stop" && !this.content.text && this.calls.size === 0) end = "ended without an answer";
    this.foot.append(end && h("span", { class: "end" }, end), ...this.#figures());
    if (this.content.text) this.foot.append(copyButton(() => this.content.text, "Copy the answer"));
  }

  #figures() {
    const usage = this.#usage;
    if (!usage || !this.#first) return [];
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const span = (this.#last - this.#first) / 1000;
    const rate = usage.completion_tokens > 1 && span > 0.05 ? [`${number((usage.completion_tokens - 1) / span)} tokens/s`] : [];
    return [
      `${usage.prompt_tokens.toLocaleString("en")} in${cached ? ` (${cached.toLocaleString("en")} cached)` : ""}`,
      `${usage.completion_tokens.toLocaleString("en")} out`,
      `first after ${seconds((this.#first - this.#begun) / 1000)}`,
      ...rate,
    ].map((text) => h("span", {}, text));
  }

  /** Whether anything was thought or said, and so belongs to the conversation. */
  get said() {
    return Boolean(this.reasoning.text || this.content.text) || this.whole.length > 0;
  }

  get whole() {
    return [...this.calls.values()].filter((call) => call.whole);
  }

  /** The answer as the next request sends it back: unchanged, thinking included. */
  get message() {
    const message = { role: "assistant", content: this.content.text };
    if (this.reasoning.text) message.reasoning_content = this.reasoning.text;
    if (this.whole.length) message.tool_calls = this.whole.map((call) => call.message);
    return message;
  }
}

/** A refusal or a broken stream, in the server's words, with a way to ask again. */
export function errorNote(error, again) {
  const kind = [error.status || null, error.type || error.code].filter(Boolean).join(" · ");
  const details = [error.param && `field ${error.param}`, error.requestId && `request ${error.requestId}`].filter(Boolean);
  const wait = error.retryAfter ? `Try again in ${error.retryAfter} s` : "Try again";
  return h(
    "div",
    { class: "error", role: "alert" },
    kind && h("p", { class: "kind" }, kind),
    h("p", { class: "words" }, error.message),
    details.length ? h("p", { class: "id" }, details.join(" · ")) : "",
    h("button", { type: "button", class: "small", onclick: again }, wait),
  );
}
