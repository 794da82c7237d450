"""What the tests of the page do with it, and what they feed it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

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


IDLE = "fetch('page/live').then((answer) => answer.json()).then((live) => live.running === 0)"
"""For `until`: nothing runs in the engine."""


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
