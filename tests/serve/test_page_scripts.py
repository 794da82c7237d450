"""The page's scripts called one by one in a real browser: parsing, layout of JSON, and what the charts compute.

Needs playwright (`pip install k3hal[browser]`) and a Chromium: the one `CHROMIUM` names, or one on the path.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Scripted
from .page_driver import Show

pytestmark = pytest.mark.tools

Call = Callable[..., Any]


@pytest.fixture
def call(api: Scripted, show: Show) -> Call:
    """`call(module, expression, argument)`: an expression over a module's exports `m` and an argument `a`."""
    page = show(api.server.url)

    def run(module: str, expression: str, argument: Any = None) -> Any:
        return page.evaluate(
            f"async (a) => {{ const m = await import('/page/{module}'); return {expression}; }}", argument
        )

    return run


def test_events_come_out_the_same_however_their_bytes_are_cut(call: Call) -> None:
    stream = 'data: {"a": "ü😀"}\n\n: keep-alive\n\nevent: x\r\ndata:b\r\n\r\n'
    stream += "data: one\ndata: two\n\n\n\ndata: [DONE]\n\ndata: cut"
    expected = ['{"a": "ü😀"}', "b", "one\ntwo", "[DONE]"]
    every_cut = """(() => {
      const bytes = new TextEncoder().encode(a);
      const parse = (...pieces) => { const p = new m.EventParser(); return pieces.flatMap((piece) => p.feed(piece)); };
      const cuts = [...bytes.keys()].map((i) => parse(bytes.slice(0, i), bytes.slice(i)));
      return [...cuts, parse(...Array.from(bytes, (byte) => new Uint8Array([byte])))].map((one) => JSON.stringify(one));
    })()"""
    assert {json.dumps(json.loads(found)) for found in call("api.js", every_cut, stream)} == {json.dumps(expected)}


def _tokens(text: str) -> list[str]:
    return re.findall(r'"(?:[^"\\]|\\.)*"|[^\s"\[\]{},:]+|[\[\]{},:]', text)


def _some_json(draw: random.Random, depth: int) -> Any:
    kind = draw.randrange(4 if depth else 2)
    if kind == 0:
        return draw.choice(["", 'a "b" {c}: [d], \\', "\n\u2028", "é", "}"])
    if kind == 1:
        return draw.choice([0, -1.5e300, True, None, 12345678901234567890])
    items = [_some_json(draw, depth - 1) for _ in range(draw.randrange(4))]
    return items if kind == 2 else {draw.choice("abc{") + str(i): item for i, item in enumerate(items)}


def test_json_is_laid_out_without_touching_a_literal(call: Call) -> None:
    draw = random.Random(9)
    values = [_some_json(draw, 4) for _ in range(300)]
    texts = [json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1])) for value in values]
    shown = call("json.js", "a.map(m.indented)", texts)
    for value, text, out in zip(values, texts, shown, strict=True):
        assert _tokens(out) == _tokens(text)
        assert [line.strip() for line in out.split("\n")] == [
            line.strip() for line in json.dumps(value, indent=2, ensure_ascii=text.isascii()).split("\n")
        ]
    assert call("json.js", "a.map(m.indented)", ['{"x":1.0}', "{}", "[ ]", "[1", "", "no"]) == [
        '{\n  "x": 1.0\n}',
        "{}",
        "[]",
        "[1",
        "",
        "no",
    ]


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ([0, 4, 4, 4], 0.5, 1.5),
        ([0, 4, 4, 4], 1.0, 2.0),
        ([2, 4, 8, 8], 0.25, 1.0),
        ([2, 4, 8, 8], 0.75, 3.0),
        ([0, 0, 0, 3], 0.95, 4.0),
        ([1, 1, 1, 2], 0.5, 1.0),
    ],
)
def test_quantiles_of_a_histogram(call: Call, counts: list[int], share: float, value: float) -> None:
    assert call("live.js", f"m.quantile([1, 2, 4], a, {share})", counts) == value


def _sample(time: float, **figures: Any) -> dict[str, Any]:
    none = {"bounds": [1, 2], "counts": [0, 0, 0], "sum": 0}
    zero = dict.fromkeys(("running", "waiting", "kv_usage", "cached_usage", "steps"), 0)
    zero |= dict.fromkeys(("generation_tokens", "prompt_tokens", "prefix_queries", "prefix_hits"), 0)
    return zero | {"time": time, "latency": {"ttft": none, "itl": none}} | figures


def test_chart_values_are_differences(call: Call) -> None:
    few = {"bounds": [1, 2], "counts": [1, 1, 1], "sum": 0.5}
    more = {"bounds": [1, 2], "counts": [1, 5, 5], "sum": 6.5}
    samples = [
        _sample(100, prefix_queries=1000, prefix_hits=1000, latency={"ttft": few, "itl": few}),
        _sample(110, prefix_queries=1000, prefix_hits=1000, latency={"ttft": few, "itl": few}),
        _sample(118, generation_tokens=10, prompt_tokens=5, steps=2, prefix_queries=1200, prefix_hits=1050)
        | {"latency": {"ttft": more, "itl": few}},
        _sample(120, running=3, waiting=1, kv_usage=0.5, cached_usage=0.25, generation_tokens=50, prompt_tokens=5)
        | {"steps": 12, "prefix_queries": 1200, "prefix_hits": 1050, "latency": {"ttft": more, "itl": few}},
    ]
    assert call("live.js", "m.values(a)", samples) == {
        "requests": [3, 1],
        "batch": [4],
        "generated": [20],
        "prompt": [0],
        "cache": [0.5, 0.25],
        "hits": [0.25],
        "ttft": [1.5, pytest.approx(1.95)],
        "itl": [None, None],
    }
    first = call("live.js", "m.values(a)", samples[:1])
    assert first["generated"] == first["batch"] == first["hits"] == [None]


def test_layers_are_told_as_ranges(call: Call) -> None:
    given = [[], [3], [0, 1, 2, 4, 6, 7]]
    assert call("plan.js", "a.map(m.layerRanges)", given) == ["", "3", "0–2, 4, 6–7"]
