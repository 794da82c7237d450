"""The page around its chat in a real browser: the server's state, charts, plan, keys, colours and widths.

Needs playwright (`pip install k3hal[browser]`) and a Chromium: the one `CHROMIUM` names, or one on the path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .conftest import Scripted
from .page_driver import PLAN, Show, ask, set_tools, settled, until

pytestmark = pytest.mark.tools


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
        page.route("**/page/live", lambda route: route.fulfill(json=live | {"status": "dead"}))
        page.wait_for_selector("text=Engine failed")
        assert "The engine has failed" in trouble.inner_text()
        page.unroute("**/page/live")
        server.state.drain()
        page.wait_for_selector("text=Shutting down")
        ask(page, "Hi")
        page.wait_for_selector(".error")
        assert page.locator(".error .kind").inner_text().startswith("503 · ")
        page.route("**/page/live", lambda route: route.abort())
        page.wait_for_selector("#status.bad")
        assert status.inner_text() == "No answer" and "keeps asking" in trouble.inner_text()
        server.state.leaving = server.state.draining = False
        page.unroute("**/page/live")
        page.wait_for_selector("#status.good")
        assert trouble.is_hidden()
        page.get_by_role("button", name="Try again").click()
        settled(page)
        assert page.locator(".turn.answer > .text").inner_text() == "a"


def _asked(page: Any, path: str) -> list[str]:
    """The requests for `path` from now on."""
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url) if request.url.endswith(path) else None)
    return seen


def test_nothing_is_asked_while_nobody_looks(api: Scripted, show: Show) -> None:
    page = show(api.server.url)
    hide = "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    page.wait_for_timeout(300)  # one that was under way
    asked = _asked(page, "/page/live")
    page.wait_for_timeout(2500)
    assert asked == []
    page.evaluate(hide, False)
    for _ in range(2):
        with page.expect_request("**/page/live"):
            pass


def test_another_server_at_the_same_place_is_read_anew(api: Scripted, show: Show) -> None:
    page = show(api.server.url)
    live, about = (httpx.get(f"{api.server.url}/page/{name}").json() for name in ("live", "about"))
    asked = _asked(page, "/page/about")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Kept.")
    page.route("**/page/about", lambda route: route.fulfill(json=about | {"models": ["new"], "started": 7}))
    page.route("**/page/live", lambda route: route.fulfill(json=live | {"started": 7}))
    page.wait_for_selector("text=serves new")
    page.wait_for_timeout(1500)
    assert len(asked) == 1
    assert page.get_by_label("System prompt").input_value() == "Kept."
    assert page.locator("#settings select").count() == 1


def test_charts_follow_the_server(api: Scripted, turn: Any, show: Show) -> None:
    page = show(api.server.url)
    chart = page.locator(".plot").nth(2)
    before = api.server.state.engine.stats().generation_tokens
    api.script(turn("", "word " * 400, step_s=0.02))
    ask(page, "Hi")
    until(page, "/tokens [1-9]/.test(document.querySelectorAll('.plot')[2].getAttribute('aria-label'))")
    assert page.get_by_role("img", name="Requests").get_attribute("aria-label") == "Requests, now: running 1, waiting 0"
    page.keyboard.press("Escape")
    settled(page)
    until(page, "/: mean \\d/.test(document.querySelectorAll('.plot')[6].getAttribute('aria-label'))")
    assert page.locator("#charts path.line[d*=L]").count() >= 4
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
        assert rows[0] == ["kda_decodedecode", "E5", "cpu.native", "0–2, 4, 6"]
        assert rows[1] == ["sample", "E3", "referencereference", "–"]
        assert len(rows) == 3 and rows[2][1] == "E9"
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
        ".filter((e) => e.checkVisibility() && !(e.ariaLabel || e.textContent.trim() || e.labels?.length))"
        ".map((e) => e.outerHTML)"
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
    running: Any, calling: Any, show: Show, low_contrast: Callable[[Any], list[str]], scheme: str
) -> None:
    line = calling("Thought " * 60, "x" * 400, ("f", {"k" * 120: ("string", "v" * 300)}))
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
