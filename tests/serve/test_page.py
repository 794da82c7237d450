"""The page at `/` as HTTP: its files, its headers, and the two answers it is fed with."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from importlib.resources import files

import pytest

from k3hal import __version__
from k3hal.engine.replay import ReplayEngine
from k3hal.serve.page.facts import live
from k3hal.serve.page.routes import POLICY
from k3hal.serve.settings import ServeSettings
from k3hal.serve.state import ServerConfig, ServerState

from .conftest import TOKENIZER

HI = [{"role": "user", "content": "Hi"}]
STATIC = files("k3hal.serve.page") / "static"
FILES = sorted(path.name for path in STATIC.iterdir())
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def test_the_page_and_every_file_of_it(api):
    answers = {"/": api.http.get("/")} | {f"/page/{name}": api.http.get(f"/page/{name}") for name in FILES}
    assert answers["/"].text == text("page.html")
    for path, answer in answers.items():
        assert answer.status_code == 200
        kind = "html" if path == "/" else path.rsplit(".", 1)[1]
        assert answer.headers["content-type"].startswith(TYPES[kind])
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_an_unchanged_file_is_not_sent_again(api):
    first = api.http.get("/page/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = api.http.get("/page/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_every_file_is_used_and_exists():
    named = set(re.findall(r"page/([\w.]+)", text("page.html")))
    modules = {name for file in FILES if file.endswith(".js") for name in re.findall(r'from "\./([\w.]+)"', text(file))}
    assert named | modules | {"page.html"} == set(FILES)


def test_the_policy_allows_nothing_from_elsewhere_and_nothing_inline():
    rules = {name: sources for name, _, sources in (rule.partition(" ") for rule in POLICY.split("; "))}
    assert set(rules.values()) == {"'none'", "'self'"}
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    html = text("page.html")
    assert re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL) == [""]
    assert not re.search(r"<style|\sstyle=|\son\w+=", html)


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host_or_makes_html_of_text(name):
    source = text(name).replace("http://www.w3.org/2000/svg", "")  # the name of the SVG namespace, never fetched
    assert not re.search(r"https?://|\burl\(|@import", source)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", source)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/page", 404),
        ("/page/", 404),
        ("/page/nothing.js", 404),
        ("/page/routes.py", 404),
        ("/page/%2e%2e/routes.py", 404),
        ("/page/..%2f__init__.py", 404),
        ("/page//etc/passwd", 404),
        ("/page/%2fetc%2fpasswd", 404),
        ("/page/main.js%00", 404),
        ("/page/" + "a" * 5000, 404),
    ],
)
def test_nothing_else_is_served(api, path, status):
    answer = api.http.get(path, follow_redirects=True)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/", "/page/live", "/page/about", "/page/main.js"])
def test_only_reading_is_allowed(api, path):
    assert api.http.post(path, json={}).status_code == 405
    assert api.http.head(path).status_code == 200


def test_about_says_what_is_served(api):
    about = api.http.get("/page/about").json()
    assert about.pop("started") <= time.time()
    assert about == {
        "schema": "k3hal.about/1",
        "version": __version__,
        "models": ["k3", "alias"],
        "device": "replay",
        "limits": {"max_model_len": 2000, "max_num_seqs": 256, "max_num_batched_tokens": 2000, "max_queue": 1024},
        "thinking": {"enabled": True, "effort": "max", "efforts": ["low", "high", "max"]},
        "sampling": {"temperature": 1.0, "top_p": 1.0},
        "plan": None,
    }


def test_about_carries_the_plan_and_the_checkpoint_s_sampling(running, plain):
    plan = {"schema": "k3hal.op_plan/1", "entries": []}
    with running([plain("a")], plan=plan, generation_defaults={"temperature": 0.6}) as server, server.client() as http:
        about = http.get("/page/about").json()
    assert about["plan"] == plan
    assert about["sampling"] == {"temperature": 0.6, "top_p": 1.0}


def test_live_figures_are_those_of_metrics(api, turn):
    before = api.http.get("/page/live").json()
    api.script(turn("a", "b"), turn("a", "b"))
    for _ in range(2):
        api.http.post("/v1/chat/completions", json={"messages": HI}).raise_for_status()
    now = api.http.get("/page/live").json()
    assert now["schema"] == "k3hal.live/1"
    assert (now["status"], now["needs_key"], now["running"], now["waiting"]) == ("ready", False, 0, 0)
    assert now["time"] > before["time"]
    assert now["finished"] - before["finished"] == 2
    metrics = api.http.get("/metrics").text
    for name, metric in [
        ("generation_tokens", "k3hal_generation_tokens_total"),
        ("prompt_tokens", "k3hal_prompt_tokens_total"),
        ("steps", "k3hal_engine_steps_total"),
    ]:
        assert [now[name]] == [float(n) for n in re.findall(rf"^{metric}\{{.*\}} (\S+)$", metrics, re.MULTILINE)]
    ttft = now["latency"]["ttft"]
    assert len(ttft["counts"]) == len(ttft["bounds"]) + 1
    assert ttft["counts"] == sorted(ttft["counts"])
    assert ttft["counts"][-1] - before["latency"]["ttft"]["counts"][-1] == 2
    assert ttft["sum"] > before["latency"]["ttft"]["sum"]


def test_live_sees_refusals_and_draining(running, plain):
    slow = plain("a" * 50, step_s=0.2)
    with running([slow], {"max_num_seqs": 1, "max_queue": 0}) as server, server.client() as http:
        body = {"messages": HI, "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as first:
            chunks = first.iter_raw()
            next(chunks)
            assert http.post("/v1/chat/completions", json=body).status_code == 429
            now = http.get("/page/live").json()
            assert (now["running"], now["refused"], now["finished"]) == (1, 1, 0)
        server.state.drain()
        assert http.get("/page/live").json()["status"] == "draining"


def test_a_server_that_is_not_warm_yet_says_so(turn):
    state = ServerState(ReplayEngine([turn("", "")], TOKENIZER), TOKENIZER, ServerConfig(("k3",)))
    assert live(state)["status"] == "starting"


def test_an_engine_that_died_is_told(running, plain, monkeypatch):
    with running([plain("a")]) as server, server.client() as http:
        stats = server.engine.stats()
        monkeypatch.setattr(server.engine, "stats", lambda: replace(stats, dead="out of memory"))
        assert http.get("/page/live").json()["status"] == http.get("/ready").json()["status"] == "dead"


def test_keys_do_not_guard_the_page_but_it_is_told_of_them(running, plain):
    with running([plain("a")], api_keys=("secret",)) as server, server.client() as http:
        assert http.get("/").status_code == 200
        assert http.get("/page/live").json()["needs_key"] is True
        assert "secret" not in json.dumps([http.get("/page/live").json(), http.get("/page/about").json()])
        assert http.post("/v1/chat/completions", json={"messages": HI}).status_code == 401


def test_the_page_can_be_left_out(running, plain):
    with running([plain("a")], page=False) as server, server.client() as http:
        for path in ("/", "/page/live", "/page/about", "/page/main.js"):
            assert http.get(path).status_code == 404
        assert http.get("/v1/models").status_code == 200


def test_a_config_file_may_say_off_as_yaml_reads_it():
    assert ServeSettings.model_validate({"page": False}).page == "off"
