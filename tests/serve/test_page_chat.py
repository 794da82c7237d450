"""The page's chat in a real browser, over a real server: what its user sees, types, clicks and sends.

Needs playwright (`pip install k3hal[browser]`) and a Chromium: the one `CHROMIUM` names, or one on the path.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from k3hal.engine.replay_file import ReplayLine

from .conftest import TOKENIZER, Scripted
from .page_driver import HOSTILE, IDLE, PLAN, Show, answer_once, ask, bodies, set_tools, settled, until

pytestmark = pytest.mark.tools


def test_an_answer_is_streamed_with_its_thinking_folded(api: Scripted, turn: Any, show: Show) -> None:
    page = show(api.server.url)
    api.script(turn("First I think.", "Then I answer.", step_s=0.04))
    ask(page, "Hi")
    assert page.locator(".turn.user").inner_text() == "Hi"
    page.wait_for_selector(".thinking:visible")
    assert page.get_by_role("button", name="Stop").is_visible()
    settled(page)
    assert page.locator(".turn.answer > .text").inner_text() == "Then I answer."
    thinking = page.locator(".thinking")
    assert thinking.get_attribute("open") is None
    assert thinking.locator("summary").inner_text().startswith("Thought for ")
    assert f"{len(TOKENIZER.encode_ordinary('First I think.'))} tokens" in thinking.locator("summary").inner_text()
    thinking.locator("summary").click()
    assert thinking.locator(".text").inner_text() == "First I think."
    figures = page.locator(".foot").inner_text()
    assert "in" in figures and "out" in figures and "first after" in figures
    assert page.get_by_role("button", name="Send", exact=True).is_visible()


def test_the_conversation_is_sent_back_unchanged(api: Scripted, turn: Any, calling: Any, show: Show) -> None:
    page = show(api.server.url)
    sent = bodies(page)
    set_tools(page)
    api.script(
        calling("I need f.", " Wait.\n", ("f", {"x": ("number", "1.0")}), ("f", {"y": ("string", "<b>")})),
        turn("", "Done."),
        turn("", "Bye."),
    )
    ask(page, "  Two\nlines ")
    settled(page)
    shown = page.locator(".call")
    assert shown.count() == 2
    assert shown.nth(0).locator("pre").inner_text() == '{\n  "x": 1.0\n}'
    assert shown.nth(1).locator("pre").inner_text() == '{\n  "y": "<b>"\n}'
    page.get_by_label("Result").nth(0).fill("eins")
    page.get_by_role("button", name="Send results").click()
    page.wait_for_selector("text=Done.")
    settled(page)
    ask(page, "Thanks")
    page.wait_for_selector("text=Bye.")
    settled(page)
    assert [turn_.inner_text().split("\n")[-1] for turn_ in page.locator(".turn.result").all()] == ["eins", "(empty)"]
    first, second, third = (body["messages"] for body in sent)
    assert first == [{"role": "user", "content": "  Two\nlines "}]
    assert second[:1] == first and third[: len(second)] == second
    answer, *results = second[1:]
    ids = [call["id"] for call in answer["tool_calls"]]
    assert answer == {
        "role": "assistant",
        "content": " Wait.\n",
        "reasoning_content": "I need f.",
        "tool_calls": [
            {"id": ids[0], "type": "function", "function": {"name": "f", "arguments": '{"x":1.0}'}},
            {"id": ids[1], "type": "function", "function": {"name": "f", "arguments": '{"y":"<b>"}'}},
        ],
    }
    assert results == [
        {"role": "tool", "tool_call_id": ids[0], "content": "eins"},
        {"role": "tool", "tool_call_id": ids[1], "content": ""},
    ]
    assert third[len(second) :] == [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks"}]


def test_a_long_answer_is_whole_on_the_page_and_in_the_history(running: Any, turn: Any, show: Show) -> None:
    text = (
        "\n" + "".join(f"{'  ' * (n % 3)}line {n} <i>\n{chr(10) * (n % 2)}" for n in range(700)) + "x" * 9000 + "\nend"
    )
    with running([turn(text, text, per_step=50), turn("", "Yes.")]) as server:
        page = show(server.url)
        ask(page, "Hi")
        settled(page)
        page.locator(".thinking summary").click()
        assert page.locator(".thinking .text").inner_text() == page.locator(".turn.answer > .text").inner_text() == text
        assert page.locator(".turn.answer > .text > div").count() > 2
        sent = bodies(page)
        ask(page, "Go on")
        page.wait_for_selector("text=Yes.")
        assert sent[0]["messages"][1] == {"role": "assistant", "content": text, "reasoning_content": text}


def test_settings_are_what_is_sent(api: Scripted, turn: Any, show: Show) -> None:
    page = show(api.server.url)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.post_data) if request.method == "POST" else None)
    api.script(turn("", "a"), turn("", "b"))
    ask(page, "plain")
    settled(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Thinking").select_option("high")
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Max tokens").fill("50")
    page.locator("#settings").get_by_label("Model").select_option("alias")
    page.get_by_label("Tools").fill('[{"type": "function", "function": {"name": "f"}, "big": 12345678901234567890}]')
    page.get_by_role("button", name="New chat").click()
    ask(page, "set")
    settled(page)
    assert json.loads(requests[0]) == {
        "model": "k3",
        "messages": [{"role": "user", "content": "plain"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.loads(requests[1])
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "set"}]
    assert body["thinking"] == {"type": "enabled", "effort": "high"}
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0.25, 50, "alias")
    assert '"big": 12345678901234567890' in requests[1]
    page.reload()
    page.wait_for_selector("#model:not(:empty)")
    words = page.get_by_role("button", name="Settings").inner_text()
    assert words == "Settings: system prompt, thinking high, temperature 0.25, 50 tokens, tools"
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Thinking").select_option("off")
    page.get_by_label("Tools").fill(" [ ] ")
    api.script(turn("", "c"))
    ask(page, "off")
    settled(page)
    body = json.loads(requests[2])
    assert body["thinking"] == {"type": "disabled"} and "tools" not in body


@pytest.mark.parametrize(
    ("label", "value", "problem"),
    [
        ("Tools", "[{", "Tools: not JSON"),
        ("Tools", '{"a": 1}', "Tools: a JSON list"),
        ("Temperature", "3", "Temperature: "),
        ("Max tokens", "0", "Max tokens: "),
        ("Max tokens", "1.5", "Max tokens: "),
    ],
)
def test_a_wrong_setting_is_shown_and_nothing_is_sent(
    api: Scripted, show: Show, label: str, value: str, problem: str
) -> None:
    page = show(api.server.url)
    sent = bodies(page)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label(label).fill(value)
    page.get_by_role("button", name="Settings").click()
    ask(page, "Hi")
    assert page.locator(".problem").inner_text().startswith(problem)
    assert page.get_by_label(label).evaluate("(field) => field === document.activeElement")
    assert page.get_by_label("Message", exact=True).input_value() == "Hi"
    assert sent == []


def test_markup_stays_text_wherever_it_comes_from(running: Any, calling: Any, show: Show) -> None:
    line = calling(HOSTILE, HOSTILE, (HOSTILE, {HOSTILE: ("string", HOSTILE)}))
    with running([line], model_names=(HOSTILE,), plan=PLAN) as server:
        page = show(server.url)
        set_tools(page)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System prompt").fill(HOSTILE)
        ask(page, HOSTILE)
        settled(page)
        page.locator(".thinking summary").click()
        for part in (".turn.user .text", ".thinking .text", ".turn.answer > .text"):
            assert page.locator(part).text_content() == HOSTILE
        assert page.locator(".call .who code").text_content() == HOSTILE
        assert json.loads(page.locator(".call pre").text_content()) == {HOSTILE: HOSTILE}
        page.get_by_label("Result").fill(HOSTILE)
        page.get_by_role("button", name="Send result").click()
        page.wait_for_selector(".turn.result")
        assert page.locator(".turn.result pre").text_content() == HOSTILE
        assert HOSTILE in page.locator("#model").text_content()
        page.locator("#plan summary").first.click()
        assert page.locator("#plan .reasons li").first.text_content() == HOSTILE
        settled(page)
        assert page.evaluate("window.broken") is None
        assert page.locator("img, iframe, b:not(.legend b)").count() == 0
        assert page.locator("script").count() == 1


def test_an_error_s_markup_stays_text_and_asking_again_works(api: Scripted, turn: Any, show: Show) -> None:
    page = show(api.server.url)
    error = {"error": {"message": HOSTILE, "type": HOSTILE, "param": HOSTILE, "code": None}}
    answer_once(page, status=500, json=error)
    ask(page, "Hi")
    page.wait_for_selector(".error")
    assert page.locator(".error .words").text_content() == HOSTILE
    assert page.locator(".error .kind").text_content() == f"500 · {HOSTILE}"
    assert page.evaluate("window.broken") is None
    sent = bodies(page)
    api.script(turn("", "Better."))
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("text=Better.")
    assert page.locator(".error").count() == 0 and page.locator(".turn.user").count() == 1
    assert sent[0]["messages"] == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_keeps_what_was_said_and_ends_the_request(running: Any, turn: Any, show: Show, how: str) -> None:
    with running([turn("", "word " * 400, step_s=0.02), turn("", "Yes.")]) as server:
        page = show(server.url)
        ask(page, "Count")
        until(page, "document.querySelector('.turn.answer > .text').textContent.length > 20")
        if how == "button":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        settled(page)
        said = page.locator(".turn.answer > .text").text_content()
        assert 20 < len(said) < len("word " * 400) and page.locator(".foot .end").inner_text() == "stopped"
        until(page, IDLE)
        sent = bodies(page)
        ask(page, "Go on")
        page.wait_for_selector("text=Yes.")
        assert sent[0]["messages"][1] == {"role": "assistant", "content": said}


def test_an_answer_cut_off_while_thinking_is_kept_as_far_as_it_came(api: Scripted, turn: Any, show: Show) -> None:
    page = show(api.server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("5")
    api.script(turn("A long thought.", "No."), turn("", "Yes."))
    ask(page, "Hi")
    settled(page)
    assert page.locator(".end").inner_text() == "cut off at the limit of tokens"
    thought = page.locator(".thinking .text").text_content()
    assert thought and "A long thought.".startswith(thought)
    page.get_by_label("Max tokens").fill("")
    sent = bodies(page)
    ask(page, "Go on")
    page.wait_for_selector("text=Yes.")
    assert sent[0]["messages"][1] == {"role": "assistant", "content": "", "reasoning_content": thought}


def test_a_new_chat_stops_the_old_one(running: Any, turn: Any, show: Show) -> None:
    with running([turn("", "word " * 400, step_s=0.02), turn("", "Fresh.")]) as server:
        page = show(server.url)
        ask(page, "Count")
        page.wait_for_selector(".turn.answer > .text:visible")
        page.get_by_role("button", name="New chat").click()
        sent = bodies(page)
        ask(page, "Hello")
        page.wait_for_selector("text=Fresh.")
        assert sent[0]["messages"] == [{"role": "user", "content": "Hello"}]
        assert page.locator(".turn").count() == 2 and page.locator(".end").count() == 0


def test_a_call_that_was_cut_off_is_shown_and_not_kept(api: Scripted, turn: Any, calling: Any, show: Show) -> None:
    page = show(api.server.url)
    set_tools(page)
    whole = calling("", "Now.", ("f", {"x": ("string", "abc")}), ("f", {"y": ("string", "defg")}))
    api.script(ReplayLine(whole.ids[:-40]), turn("", "Yes."))
    ask(page, "Hi")
    settled(page)
    assert page.locator(".call .end").all_inner_texts() == ["Not whole, so not part of the conversation"]
    sent = bodies(page)
    ask(page, "Again")
    page.wait_for_selector("text=Yes.")
    kept = sent[0]["messages"][1].get("tool_calls", [])
    assert len(kept) == page.locator(".call").count() - 1


def test_a_key_is_asked_for_and_sent(running: Any, turn: Any, show: Show) -> None:
    with running([turn("", "Welcome.")], api_keys=("geheim",)) as server:
        page = show(server.url)
        page.wait_for_selector("#key:visible")
        ask(page, "Hi")
        page.wait_for_selector(".error")
        assert page.locator(".error .kind").inner_text() == "401 · authentication_error"
        assert page.get_by_label("API key").evaluate("(field) => field === document.activeElement")
        page.keyboard.type("schlüssel ключ")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=no header can carry")
        page.get_by_label("API key").fill("geheim")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=Welcome.")
        assert "geheim" not in page.url and page.get_by_label("API key").get_attribute("type") == "password"


def test_no_key_is_asked_for_where_none_is_needed(api: Scripted, show: Show) -> None:
    assert show(api.server.url).get_by_label("API key").is_hidden()


def test_a_full_queue_says_when_to_try_again(running: Any, turn: Any, show: Show) -> None:
    slow = turn("", "word " * 300, step_s=0.02)
    with running([slow], {"max_num_seqs": 1, "max_queue": 0}) as server:
        one, two = show(server.url), show(server.url)
        ask(one, "Hi")
        one.wait_for_selector(".turn.answer > .text:visible")
        ask(two, "Hi")
        two.wait_for_selector(".error")
        assert two.locator(".error .kind").inner_text().startswith("429 · ")
        one.get_by_role("button", name="Stop").click()
        settled(one)
        until(one, IDLE)
        two.get_by_role("button", name="Try again in 1 s").click()
        two.wait_for_selector(".turn.answer > .text:visible")


def test_a_stream_that_breaks_off_is_no_answer(api: Scripted, turn: Any, show: Show) -> None:
    page = show(api.server.url)
    chunk = {"choices": [{"index": 0, "delta": {"content": "Half"}, "finish_reason": None}]}
    failure = {"error": {"message": "the engine failed", "type": "server_error", "param": None, "code": None}}
    first, last = f"data: {json.dumps(chunk)}\n\n", f"data: {json.dumps(failure)}\n\n"
    for body, problem in [
        (first, "ended before"),
        (first + last, "the engine failed"),
        (first + "data: <html>\n\n", "not JSON"),
    ]:
        answer_once(page, body=body)
        ask(page, "Hi")
        page.wait_for_selector(f".error >> text={problem}")
        assert page.locator(".turn.answer").last.inner_text().startswith("Half\nbroken off")
    sent = bodies(page)
    api.script(turn("", "Whole."))
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("text=Whole.")
    assert [message["role"] for message in sent[0]["messages"]] == ["user"] * 3


def test_the_newest_text_stays_in_sight_until_the_reader_scrolls(running: Any, turn: Any, show: Show) -> None:
    with running([turn("", "line\n" * 300, step_s=0.02)]) as server:
        page = show(server.url)
        ask(page, "Hi")
        until(page, "document.getElementById('log').scrollTop > 200")
        page.locator("#log").evaluate("(log) => log.scrollTo(0, 0)")
        page.wait_for_selector("#newest:visible")
        assert page.locator("#log").evaluate("(log) => log.scrollTop") == 0
        page.get_by_role("button", name="Newest").click()
        assert page.locator("#newest").is_hidden()
