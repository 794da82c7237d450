// The conversation: sends it, shows the answer as it comes, and keeps it for the next request.

import { ApiError, chat } from "./api.js";
import { byId, h } from "./dom.js";
import { apiKey, requestBody, settingsReady, toggleSettings } from "./settings.js";
import { AnswerTurn, errorNote, resultTurn, userTurn } from "./turn.js";

let messages = [];
let pending = []; // calls that wait for their results
let running = null; // the AbortController of the answer that comes
let follow = true; // whether the newest text is kept in sight
let placed = 0; // where the log was scrolled to for that
let soon = 0; // the frame that is to scroll it

const log = byId("log");
const box = byId("message");

function show(element) {
  byId("empty")?.remove();
  log.append(element);
  toNewest();
}

function toNewest() {
  follow = true;
  placed = 0;
  scroll();
}

function scroll() {
  // The reader may have scrolled up with the event still to come: text that arrives meanwhile must not take that back.
  if (log.scrollTop < placed - 1) follow = false;
  if (follow) {
    log.scrollTop = log.scrollHeight;
    placed = log.scrollTop;
  }
  byId("newest").hidden = follow;
}

/** Once a frame is enough: asking where the end is lays the page out. */
function scrollSoon() {
  if (!soon)
    soon = requestAnimationFrame(() => {
      soon = 0;
      scroll();
    });
}

function scrolled() {
  follow = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  if (follow) placed = log.scrollTop;
  byId("newest").hidden = follow;
}

const say = (text) => (byId("said").textContent = text);

/** Results of the calls that wait, empty ones included: a conversation with an unanswered call is not one. */
function takeResults() {
  for (const call of pending) {
    messages.push({ role: "tool", tool_call_id: call.id, content: call.answer.value });
    call.box.remove();
    show(resultTurn(call.name, call.answer.value));
  }
  log.querySelector(".send-results")?.remove();
  pending = [];
}

function sendResults() {
  if (running || !settingsReady()) return;
  takeResults();
  void ask();
}

function send() {
  if (running || !box.value.trim() || !settingsReady()) return;
  takeResults();
  messages.push({ role: "user", content: box.value });
  show(userTurn(box.value));
  box.value = "";
  void ask();
}

async function ask() {
  log.querySelector(".error")?.remove();
  const turn = new AnswerTurn();
  const controller = new AbortController();
  begin(controller, turn);
  const ticking = setInterval(() => turn.tick(), 500);
  try {
    for await (const chunk of chat(requestBody(messages), apiKey(), controller.signal)) {
      turn.add(chunk);
      scrollSoon();
    }
    end(turn);
  } catch (error) {
    if (controller !== running) return; // a new chat has begun
    if (error.name === "AbortError") end(turn, "stopped");
    else if (error instanceof ApiError) fail(turn, error);
    else throw error;
  } finally {
    clearInterval(ticking);
    if (controller === running) rest();
  }
}

function begin(controller, turn) {
  running = controller;
  byId("send").hidden = true;
  byId("stop").hidden = false;
  log.setAttribute("aria-busy", "true");
  show(turn.element);
  say("The model answers.");
}

function rest() {
  running = null;
  const focused = document.activeElement === byId("stop");
  byId("send").hidden = false;
  byId("stop").hidden = true;
  log.setAttribute("aria-busy", "false");
  if (focused || document.activeElement === document.body) box.focus();
  scroll();
}

function end(turn, why) {
  turn.close(why);
  if (turn.said) messages.push(turn.message);
  pending = turn.whole;
  if (pending.length) {
    pending.forEach((call) => call.answerable(sendResults));
    const words = pending.length > 1 ? "Send results" : "Send result";
    turn.callsHost.append(h("button", { type: "button", class: "send-results", onclick: sendResults }, words));
  }
  say(turn.content.text || (pending.length ? `The model calls ${pending.map((call) => call.name).join(", ")}.` : "The answer has ended."));
}

function fail(turn, error) {
  const begun = turn.reasoning.text || turn.content.text || turn.calls.size;
  if (begun) turn.close("broken off, not part of the conversation");
  else turn.element.remove();
  show(errorNote(error, () => again(turn)));
  say("");
  if (error.status === 401) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
}

function again(turn) {
  if (running || !settingsReady()) return;
  turn.element.remove();
  void ask();
}

/** Forget the conversation; an answer that comes is stopped. */
function startAfresh() {
  const stopped = running;
  if (stopped) rest();
  stopped?.abort();
  messages = [];
  pending = [];
  log.replaceChildren(
    h("p", { id: "empty", class: "empty" }, "Ask something. Thinking is folded above each answer; tool calls are shown with their arguments and wait for your result."),
  );
  toNewest();
  say("");
}

function key(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
}

/** Bring the chat to life. */
export function openChat() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("settings").addEventListener("submit", (event) => event.preventDefault());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    log.querySelector(".error button")?.click();
  });
  box.addEventListener("keydown", key);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("new-chat").addEventListener("click", () => {
    startAfresh();
    box.focus();
  });
  byId("settings-button").addEventListener("click", () => toggleSettings());
  byId("newest").addEventListener("click", toNewest);
  log.addEventListener("scroll", scrolled);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (running) running.abort();
    else if (!byId("settings").hidden) {
      toggleSettings(false);
      byId("settings-button").focus();
    }
  });
  startAfresh();
}
