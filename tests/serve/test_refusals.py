"""What a server refuses before it reads a body, and when it tells clients to come back."""

import contextlib
import gzip
import json
import time
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3hal.engine.replay_file import ReplayLine
from k3hal.serve.http_errors import HttpError
from k3hal.serve.keys import Limits
from k3hal.serve.limiter import Limiter
from k3hal.serve.pace import LONGEST, SHORTEST, Pace

from .conftest import HI

ASKED: Any = HI
BODY = {"prompt": "x", "max_tokens": 3}
POSTS = ["/v1/chat/completions", "/v1/chat/completions/render", "/v1/completions", "/v1/responses",
         "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens", "/tokenize",
         "/detokenize"]  # fmt: skip


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "declared", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json", ""]
)
def test_only_json_is_read(api, path, declared):
    """A page of another origin can send the refused types without being asked; for JSON a browser asks first."""
    headers = {} if declared is None else {"Content-Type": declared}
    answer = httpx.post(api.server.url + path, content=json.dumps({"messages": HI}).encode(), headers=headers)
    assert answer.status_code == 415
    assert answer.headers["accept-post"] == "application/json"
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "application/json" in error["message"] and "\n" not in error["message"]
    assert api.server.engine.stats().num_running == 0


@pytest.mark.parametrize(
    "declared", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json", "application/json;"]
)
def test_json_may_be_declared_in_several_ways(api, plain, declared):
    api.script(plain("a"))
    sent = {"content": json.dumps(BODY).encode(), "headers": {"Content-Type": declared}}
    assert httpx.post(f"{api.server.url}/v1/completions", **sent).status_code == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "deflate", "gzip, identity", "zstd"])
def test_encoded_bodies_are_refused_unread(api, encoding):
    body = gzip.compress(json.dumps(BODY).encode())
    answer = api.http.post("/v1/completions", content=body, headers={"Content-Encoding": encoding})
    assert answer.status_code == 415
    assert answer.headers["accept-encoding"] == "identity"
    assert encoding.split(",")[0] in answer.json()["error"]["message"]


def test_identity_is_no_encoding(api, plain):
    api.script(plain("a"))
    headers = {"Content-Encoding": "identity"}
    assert api.http.post("/v1/completions", json=BODY, headers=headers).status_code == 200


def test_a_page_of_another_origin_is_not_let_through(running, plain):
    """Without `--cors-origin` the question a browser asks before it sends JSON is not answered."""
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "content-type"}  # fmt: skip
    with running([plain("a")]) as server, server.client() as http:
        answer = http.options("/v1/completions", headers=asked)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]
    with running([plain("a")], cors_origins=("http://mine.example",)) as server, server.client() as http:
        assert "access-control-allow-origin" not in http.options("/v1/completions", headers=asked).headers
        mine = http.options("/v1/completions", headers={**asked, "Origin": "http://mine.example"})
        assert mine.headers["access-control-allow-origin"] == "http://mine.example"


def test_the_clients_that_people_use_declare_what_they_send(running, turn):
    with running([turn("Hm.", "Yes.")]) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model="k3", messages=ASKED)
            assert answer.choices[0].message.content == "Yes."
        with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            assert client.messages.create(model="k3", messages=ASKED, max_tokens=500).stop_reason == "end_turn"


def test_waiting_is_reckoned_from_the_ends_so_far():
    now = [100.0]
    pace = Pace(lambda: now[0])
    now[0] += 5
    assert pace.until(9) == 5, "nothing has ended: as long again"
    for _ in range(10):
        now[0] += 0.5
        pace.ended()
    assert pace.until(20) == pytest.approx(20)  # ten in ten seconds
    now[0] += 10
    assert pace.until(20) == pytest.approx(40), "a pause counts"
    now[0] += 300
    assert pace.until(1) == LONGEST
    pace.began()
    assert pace.until(1) == SHORTEST, "a new beginning knows nothing"


@given(st.lists(st.one_of(st.floats(0, 200), st.just(None)), max_size=600), st.integers(0, 5000))
def test_waiting_stays_within_its_bounds_whatever_happens(steps, number):
    now = [0.0]
    pace = Pace(lambda: now[0])
    for step in steps:
        if step is None:
            pace.ended()
        else:
            now[0] += step
        assert SHORTEST <= pace.until(number) <= LONGEST


def test_a_thousand_ends_a_second_are_remembered_as_such():
    now = [0.0]
    pace = Pace(lambda: now[0])
    for _ in range(3000):
        now[0] += 0.001
        pace.ended()
    assert pace.until(5000) == pytest.approx(5, rel=0.02)


def refused(limiter, limits):
    with pytest.raises(HttpError) as caught:
        limiter.enter("a", limits)
    return int(caught.value.headers["Retry-After"])


def test_a_keys_places_are_free_as_fast_as_its_requests_end():
    now = [0.0]
    limiter, limits = Limiter(clock=lambda: now[0]), Limits(max_concurrent=1)
    limiter.enter("a", limits)
    now[0] += 7
    assert refused(limiter, limits) == 7
    limiter.leave("a")
    limiter.enter("a", limits)
    assert refused(limiter, limits) == 1


def test_a_full_queue_says_when_it_will_have_been_worked_off(running):
    """One at a time, a quarter of a second each: what waits behind the eighth waits two seconds."""
    line = ReplayLine((39,) * 5, 1, 0.05)
    with running([line], {"max_num_seqs": 1, "max_queue": 8}) as server, contextlib.ExitStack() as open_ones:
        http = open_ones.enter_context(server.client())

        def fill():
            """Ask until one is refused: how many were not, and when that one may come again."""
            for number in range(20):
                request = http.build_request("POST", "/v1/completions", json={**BODY, "max_tokens": 5, "stream": True})
                answer = http.send(request, stream=True)
                open_ones.callback(answer.close)
                if answer.status_code == 429:
                    return number, int(answer.headers["retry-after"])
            raise AssertionError("the queue was never full")

        first, soon = fill()
        assert (first >= 9, soon) == (True, 1)
        time.sleep(1.6)
        more, later = fill()
        assert more > 0
        assert 2 <= later <= 8
