"""The page at `/` in a real browser, over a real server: what its user sees, types, clicks and sends.

Needs playwright (`pip install k3hal[browser]`) and a Chromium: the one `CHROMIUM` names, or one on the path.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from k3hal.engine.replay_file import ReplayLine
from k3hal.serve.xtml import Segment, close_tag, element, encode, open_tag
from k3hal.tokenizer import END_OF_MSG

from .conftest import TOKENIZER, Scripted

Show = Callable[..., Any]
HOSTILE = "<img src=x onerror='window.broken = 1'><script>window.broken = 2</script>&amp;<b>\u202e\"'`${1}"
TOOLS = '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "maximum": 1.0}}}]'
PLAN = {
    "schema": "k3hal.op_plan/1",
    "device": "cpu",
    "model": HOSTILE,
    "dtype": "bfloat16",
    "policy": "warn",
    "machine": {"vendor": "cpu", "arch": "x86_64"},
    "entries": [
        {"op": op, "layers": layers, "phase": phase, "provider": provider, "backend": "cpu", "level": level}
        | {"composed": False, "reference": provider == "reference", "reasons": [HOSTILE], "dims": {"n": n}, "parts": {}}
        for n, (op, layers, phase, provider, level) in enumerate(
            [
                ("kda_decode", [0, 1, 2, 4], "decode", "cpu.native", "E5"),
                ("kda_decode", [6], "decode", "cpu.native", "E5"),
                ("sample", [], "any", "reference", "E3"),
                ("odd", [1], "any", HOSTILE, "E9"),
            ]
        )
    ],
}


@pytest.fixture
def show(browser: Any) -> Iterator[Show]:
    """`show(url, **context options)`: the page; at the end no script failed and nothing was asked of anybody else."""
    troubles: list[str] = []
    contexts: list[Any] = []

    def opened(url: str, **options: Any) -> Any:
        context = browser.new_context(reduced_motion="reduce", **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        # The browser's own note on a refusal, which the tests that provoke one look at in the page.
        expected = ("Failed to load resource: the server responded", "Failed to load resource: net::ERR")
        page.on("console", lambda note: None if note.text.startswith(expected) else troubles.append(note.text))
        page.on("request", lambda request: None if request.url.startswith(url) else troubles.append(request.url))
        page.goto(url)
        page.wait_for_selector("#model:not(:empty)")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


def calls(reasoning: str, content: str, *calls: tuple[str, dict[str, tuple[str, str]]], **fields: Any) -> ReplayLine:
    """A turn that ends in calls, each a name and `{key: (type, text)}`."""
    parts = [Segment(reasoning), *close_tag("think"), *element("response", content), *open_tag("tools")]
    for index, (name, arguments) in enumerate(calls, start=1):
        parts += open_tag("call", ("tool", name), ("index", str(index)))
        for key, (kind, value) in arguments.items():
            parts += [*open_tag("argument", ("key", key), ("type", kind)), Segment(value), *close_tag("argument")]
        parts += close_tag("call")
    parts += [*close_tag("tools"), *close_tag("message"), Segment(END_OF_MSG, True)]
    return ReplayLine(tuple(encode(parts, TOKENIZER)), **fields)


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def settled(page: Any) -> None:
    page.wait_for_selector("#log[aria-busy=false] .turn.answer .foot:not(:empty), #log[aria-busy=false] .error")


def until(page: Any, condition: str) -> None:
    """Wait for a script's value: playwright's own way of it needs `eval`, which the page forbids."""
    end = time.monotonic() + 10
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(20)


def answer_once(page: Any, **answer: Any) -> None:
    """What the next chat request gets in place of the server's answer."""
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer), times=1)


def bodies(page: Any) -> list[dict[str, Any]]:
    """The chat requests that the page sends from now on, as they are sent."""
    sent: list[dict[str, Any]] = []
    path = "/v1/chat/completions"
    page.on("request", lambda request: sent.append(request.post_data_json) if request.url.endswith(path) else None)
    return sent


def set_tools(page: Any, text: str = TOOLS) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Tools").fill(text)
    page.get_by_role("button", name="Settings").click()


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


def test_the_conversation_is_sent_back_unchanged(api: Scripted, turn: Any, show: Show) -> None:
    page = show(api.server.url)
    sent = bodies(page)
    set_tools(page)
    api.script(
        calls("I need f.", " Wait.\n", ("f", {"x": ("number", "1.0")}), ("f", {"y": ("string", "<b>")})),
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


def test_markup_stays_text_wherever_it_comes_from(running: Any, show: Show) -> None:
    line = calls(HOSTILE, HOSTILE, (HOSTILE, {HOSTILE: ("string", HOSTILE)}))
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
        assert 20 < len(said) < 1000 and page.locator(".foot .end").inner_text() == "stopped"
        until(page, "fetch('page/live').then((answer) => answer.json()).then((live) => live.running === 0)")
        sent = bodies(page)
        ask(page, "Go on")
        page.wait_for_selector("text=Yes.")
        assert sent[0]["messages"][1] == {"role": "assistant", "content": said}


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


def test_a_call_that_was_cut_off_is_shown_and_not_kept(api: Scripted, turn: Any, show: Show) -> None:
    page = show(api.server.url)
    set_tools(page)
    whole = calls("", "Now.", ("f", {"x": ("string", "abc")}), ("f", {"y": ("string", "defg")}))
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
        two.get_by_role("button", name="Try again in 1 s").click()
        two.wait_for_selector(".turn.answer > .text:visible")


def test_a_server_that_starts_drains_goes_and_comes_back(running: Any, turn: Any, show: Show) -> None:
    with running([turn("", "a")]) as server:
        page = show(server.url)
        status, trouble = page.locator("#status"), page.locator("#trouble")
        page.wait_for_selector("#status.good")
        assert trouble.is_hidden()
        live = httpx.get(f"{server.url}/page/live").json()
        page.route("**/page/live", lambda route: route.fulfill(json=live | {"status": "starting"}))
        page.wait_for_selector("text=Warming up")
        assert "warming up" in trouble.inner_text()
        page.unroute("**/page/live")
        server.state.draining = True
        page.wait_for_selector("text=Shutting down")
        ask(page, "Hi")
        page.wait_for_selector(".error")
        assert page.locator(".error .kind").inner_text().startswith("503 · ")
        page.route("**/page/live", lambda route: route.abort())
        page.wait_for_selector("#status.bad")
        assert status.inner_text() == "No answer" and "keeps asking" in trouble.inner_text()
        server.state.draining = False
        page.unroute("**/page/live")
        page.wait_for_selector("#status.good")
        assert trouble.is_hidden()
        page.get_by_role("button", name="Try again").click()
        settled(page)
        assert page.locator(".turn.answer > .text").inner_text() == "a"


def test_a_stream_that_breaks_off_is_no_answer(api: Scripted, turn: Any, show: Show) -> None:
    page = show(api.server.url)
    chunk = {"choices": [{"index": 0, "delta": {"content": "Half"}, "finish_reason": None}]}
    failure = {"error": {"message": "the engine failed", "type": "server_error", "param": None, "code": None}}
    for events, problem in [([chunk], "ended before"), ([chunk, failure], "the engine failed")]:
        answer_once(page, body="".join(f"data: {json.dumps(one)}\n\n" for one in events))
        ask(page, "Hi")
        page.wait_for_selector(f".error >> text={problem}")
        assert page.locator(".turn.answer").last.inner_text().startswith("Half\nbroken off")
    sent = bodies(page)
    api.script(turn("", "Whole."))
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector("text=Whole.")
    assert [message["role"] for message in sent[0]["messages"]] == ["user", "user"]


def test_charts_follow_the_server(api: Scripted, turn: Any, show: Show) -> None:
    page = show(api.server.url)
    chart = page.locator(".plot").nth(2)
    before = api.server.state.engine.stats().generation_tokens
    api.script(turn("", "word " * 60, step_s=0.02))
    ask(page, "Hi")
    until(page, "/tokens [1-9]/.test(document.querySelectorAll('.plot')[2].getAttribute('aria-label'))")
    assert page.get_by_role("img", name="Requests").get_attribute("aria-label") == "Requests, now: running 1, waiting 0"
    settled(page)
    until(page, "/: mean \\d/.test(document.querySelectorAll('.plot')[6].getAttribute('aria-label'))")
    assert page.locator("#charts path.line[d*=L]").count() >= 5
    assert chart.get_attribute("aria-label").startswith("Generated, now: tokens ")
    chart.focus()
    page.keyboard.press("ArrowLeft")
    assert " s ago: tokens " in chart.get_attribute("aria-label")
    page.keyboard.press("Tab")
    assert ", now: " in chart.get_attribute("aria-label")
    made = api.server.state.engine.stats().generation_tokens - before
    until(page, f"document.getElementById('totals').textContent.includes('{before + made:,} token')")


def test_the_plan_shows_each_operator_s_provider_and_evidence(running: Any, turn: Any, show: Show) -> None:
    with running([turn("", "a")], plan=PLAN) as server:
        page = show(server.url)
        rows = [row.locator("th, td").all_inner_texts() for row in page.locator("#plan tbody tr").all()]
        assert rows[0] == ["kda_decodedecode", "cpu.native", "E5", "0–2, 4, 6"]
        assert rows[1] == ["sample", "referencereference", "E3", "–"]
        assert len(rows) == 3 and rows[2][2] == "E9"
        assert page.locator(".levels dd").all_inner_texts() == [
            "1 × performance measured on the device",
            "1 × operator conformance on the device",
        ]


def test_an_engine_without_a_plan_says_so(api: Scripted, show: Show) -> None:
    assert "has no dispatch plan" in show(api.server.url).locator("#plan").inner_text()


def test_keys_alone_do_everything(api: Scripted, turn: Any, show: Show) -> None:
    page = show(api.server.url)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    api.script(turn("Hm.", "Yes."))
    page.keyboard.press("Enter")
    settled(page)
    assert page.locator(".turn.user").inner_text() == "One\nTwo"
    assert page.evaluate("document.activeElement.id") == "message"
    seen = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.textContent || document.activeElement.id"))
        ring = page.evaluate("document.activeElement === document.body || "
                             "getComputedStyle(document.activeElement).outlineStyle")  # fmt: skip
        assert ring in (True, "solid")
    assert {"Dark", "Settings", "New chat", "Copy"} <= seen
    names = page.evaluate(
        "[...document.querySelectorAll('button, input, select, textarea, summary')]"
        ".filter((e) => e.checkVisibility() && !(e.ariaLabel || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)"
    )
    assert names == []


def test_light_and_dark_can_be_switched(api: Scripted, show: Show) -> None:
    page = show(api.server.url, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(ground) != light
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(ground) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_and_nothing_is_wider_than_the_screen(
    running: Any, turn: Any, show: Show, low_contrast: Callable[[Any], list[str]], scheme: str
) -> None:
    line = calls("Thought " * 60, "x" * 400, ("f", {"k" * 120: ("string", "v" * 300)}))
    with running([line], plan=PLAN, api_keys=("k",)) as server:
        page = show(server.url, color_scheme=scheme)
        page.get_by_label("API key").fill("k")
        set_tools(page)
        ask(page, "y" * 300)
        settled(page)
        page.locator(".thinking summary").click()
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System prompt").fill("z" * 300)
        page.get_by_role("button", name="Send result").click()
        page.wait_for_selector(".error")
        assert low_contrast(page) == []
        for width in (320, 390, 820, 1440):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("#chat").evaluate("(e) => e.scrollWidth <= e.clientWidth")
            assert page.locator("#log").evaluate("(e) => e.scrollWidth <= e.clientWidth")


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
