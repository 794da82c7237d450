"""What a server tells of its requests: log lines, traces, metrics; and what it tries before it is ready."""

import json
import logging
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest

from k3hal.serve.logs import FIELDS, JsonLines, TextLines

HI = [{"role": "user", "content": "a-secret-word"}]


def lines_of(caplog, path="/v1/"):
    found = [getattr(record, FIELDS) for record in caplog.records if record.name == "k3hal.serve.requests"]
    return [fields for fields in found if fields["path"].startswith(path)]


def eventually(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def test_a_request_is_one_line_of_figures_without_its_words(running, turn, caplog):
    caplog.set_level(logging.INFO, "k3hal.serve")
    headers = {"x-api-key": "the-key", "x-request-id": "r1"}
    with running([turn("Hm.", "an-answer")], api_keys=("the-key",)) as server, server.client(headers=headers) as http:
        http.post("/v1/chat/completions", json={"messages": HI, "odd": 1})
        http.post("/v1/chat/completions", json={"messages": 3})
        http.get("/health")
    done, refused = lines_of(caplog)
    assert (done["request_id"], done["method"], done["status"], done["model"]) == ("r1", "POST", 200, "k3")
    assert (done["completion_tokens"], done["finish_reasons"]) == (len(turn("Hm.", "an-answer").ids), ["stop"])
    assert done["prompt_tokens"] > 10
    assert 0 <= done["queue_s"] <= done["duration_s"] < 10
    assert (done["key"][:4], done["ignored_fields"]) == ("key-", ["odd"])
    assert (refused["status"], refused["path"]) == (400, "/v1/chat/completions")
    text = repr([done, refused]) + caplog.text
    assert not any(word in text for word in ("secret-word", "an-answer", "the-key"))


def test_prompts_are_logged_where_that_is_asked_for(running, turn, plain, caplog):
    caplog.set_level(logging.INFO, "k3hal.serve")
    with running([turn("a", "b"), plain("c")], log_prompts=True) as server, server.client() as http:
        http.post("/v1/chat/completions", json={"messages": HI})
        http.post("/v1/completions", json={"prompt": ["one", "two"], "max_tokens": 1})
    chat, text = lines_of(caplog)
    assert '<|open|>message role="user"<|sep|>a-secret-word<|close|>' in chat["prompt"]
    assert text["prompt"] == "one\ntwo"


def test_a_client_that_leaves_is_a_499(running, plain, caplog):
    caplog.set_level(logging.INFO, "k3hal.serve")
    with running([plain("x" * 500, step_s=0.02)]) as server, server.client() as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 500, "stream": True}) as answer:
            next(answer.iter_lines())
        eventually(lambda: lines_of(caplog))
    assert lines_of(caplog)[0]["status"] == 499
    assert lines_of(caplog)[0]["completion_tokens"] < 500


def test_the_forms_of_a_log_line():
    record = logging.LogRecord("k3hal.serve", logging.WARNING, "f", 1, "it is %s", ("so",), None)
    setattr(record, FIELDS, {"path": "/v1/x", "n": 2, "s": 0.123456789, "text": 'two words\n"x"=1', "none": ""})
    line = json.loads(JsonLines().format(record))
    assert (line["level"], line["message"], line["n"], line["text"]) == ("warning", "it is so", 2, 'two words\n"x"=1')
    assert line["time"].endswith("+00:00")
    text = TextLines().format(record)
    assert text.endswith(r'WARNING it is so path=/v1/x n=2 s=0.123457 text="two words\n\"x\"=1" none=""')
    try:
        raise ValueError("bad")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    assert "\n" not in JsonLines().format(record)
    assert "ValueError: bad" in json.loads(JsonLines().format(record))["exception"]


def test_a_request_is_a_span_under_its_clients(running, turn):
    pytest.importorskip("opentelemetry.sdk", reason="needs k3hal[otel]")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from k3hal.serve.tracing import provider_of

    exporter = InMemorySpanExporter()
    provider = provider_of(exporter)
    parent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with running([turn("a", "b")], traces=provider) as server, server.client() as http:
        http.post("/v1/chat/completions", json={"messages": HI}, headers=parent)
        http.post("/v1/chat/completions", json={"messages": HI, "stream": True})
        http.post("/v1/messages", json={})
        http.get("/health")
    provider.shutdown()
    spans: Any = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["POST /v1/chat/completions"] * 2 + ["POST /v1/messages"]
    assert f"{spans[0].context.trace_id:x}" == "af7651916cd43dd8448eb211c80319c"
    assert spans[0].parent.span_id == 0xB7AD6B7169203331
    assert spans[1].parent is None
    facts = spans[0].attributes
    assert facts["gen_ai.usage.output_tokens"] == spans[1].attributes["gen_ai.usage.output_tokens"]
    assert facts["gen_ai.request.model"] == "k3"
    assert (facts["http.response.status_code"], spans[2].attributes["http.response.status_code"]) == (200, 400)
    assert "secret-word" not in repr([span.to_json() for span in spans])


def test_a_full_warm_up_asks_everything_before_the_server_is_ready(running, turn, caplog):
    caplog.set_level(logging.INFO, "k3hal.serve")
    limits = {"max_model_len": 600, "max_num_seqs": 5}
    with running([turn("a", "b")], limits, warm_up="full", api_keys=("k",)) as server, server.client() as http:
        assert http.get("/ready").status_code == 200
        assert len(lines_of(caplog)) == 10
        assert {line["request_id"] for line in lines_of(caplog)} == {"warm-up"}
        assert max(line["prompt_tokens"] for line in lines_of(caplog)) == 596
        assert http.post("/v1/completions", json={}).status_code == 401
    text = caplog.text
    for case in ("a short chat", "596 tokens", "found in the cache", "5 chats at once", "with tools", "in JSON"):
        assert f"warm-up: {case}" in text or case in text


def test_a_context_too_short_for_any_chat_is_warmed_up_all_the_same(running, plain):
    with running([plain("a")], {"max_model_len": 8}, warm_up="full") as server, server.client() as http:
        assert http.get("/ready").status_code == 200


def test_an_answer_that_takes_too_long_is_504(running, plain):
    slow = plain("x" * 500, step_s=0.02)
    body = {"prompt": "x", "max_tokens": 500}
    with running([slow], request_timeout=0.2) as server, server.client() as http:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 504
        assert answer.json()["error"] == {
            "message": "the answer took longer than 0.2 s", "type": "timeout_error", "param": None, "code": "timeout",
        }  # fmt: skip
        streamed = http.post("/v1/completions", json={**body, "stream": True})
        assert streamed.text.split("\n\n")[-2].startswith('data: {"error":{"message":"the answer took longer')
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99, "stream": True}
        assert '"type":"timeout_error"' in http.post("/v1/messages", json=asked).text
        eventually(lambda: server.engine.stats().num_running == 0)


TYPE = b"Content-Type: application/json\r\n"


def connect(server):
    return socket.create_connection(server.url.removeprefix("http://").split(":"), timeout=5)


def test_a_request_head_has_an_end_in_size_and_time(running, plain):
    with running([plain("a")], head_timeout=0.3) as server:
        with connect(server) as raw:
            raw.sendall(b"GET /health HTTP/1.1\r\n" + b"X-Filler: y\r\n" * 6000)
            assert raw.makefile("rb").read().startswith(b"HTTP/1.1 431 ")
        for start in (b"", b"GET /health HT"):
            with connect(server) as raw:
                raw.sendall(start)
                assert raw.makefile("rb").read().startswith(b"HTTP/1.1 408 ")


def test_a_client_that_never_reads_is_dropped(running, plain):
    endless = plain("x" * 300_000, per_step=2000)
    body = json.dumps({"prompt": "x", "max_tokens": 300_000, "stream": True, "logprobs": 5}).encode()
    with running([endless], write_timeout=0.3) as server, connect(server) as raw, server.client() as http:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + TYPE + b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        eventually(lambda: server.engine.stats().generation_tokens > 0)
        eventually(lambda: "k3hal_client_disconnects_total{" in http.get("/metrics").text, 20)
        assert server.engine.stats().num_running == 0


class Collector(BaseHTTPRequestHandler):
    """Where traces go."""

    got: list[bytes] = []  # noqa: RUF012 - one list for the one test

    def do_POST(self):
        self.got.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format, *args):
        """Quiet."""


def test_the_command_logs_traces_and_takes_its_keys_from_a_file(tmp_path, synthetic_dir, k3hal):
    pytest.importorskip("opentelemetry.sdk", reason="needs k3hal[otel]")
    (tmp_path / "keys").write_text("sk-one name=alice requests_per_minute=1\n")
    (tmp_path / "r.jsonl").write_text('{"ids": [39]}\n')
    (tmp_path / "config.yaml").write_text(
        "log-level: info\nlog-format: json\nwarm-up: off\ncors-origin: https://a.test\n"
    )
    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    command = k3hal("serve", "--engine", f"replay:{tmp_path / 'r.jsonl'}", "--tokenizer", synthetic_dir, "--port", "0",
                    "--api-key-file", tmp_path / "keys", "--config", tmp_path / "config.yaml",
                    "--otlp-traces-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces")  # fmt: skip
    try:
        url = command.process.stdout.readline().split(" on ")[1].split()[0]
        with httpx.Client(
            base_url=url, headers={"x-api-key": "sk-one", "origin": "https://a.test"}, timeout=20
        ) as http:
            answer = http.post("/v1/completions", json={"prompt": "x"})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://a.test")
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 429
        command.process.send_signal(signal.SIGTERM)
        code, _, errors = command.finish()
    finally:
        command.process.kill()
        command.finish()
        collector.shutdown()
        collector.server_close()
    assert code == 0, errors
    lines = [json.loads(line) for line in errors.splitlines()]
    requests = [line for line in lines if line["message"] == "request"]
    assert [(line["status"], line["key"]) for line in requests] == [(200, "alice"), (429, "alice")]
    assert "sk-one" not in errors
    assert b"POST /v1/completions" in b"".join(Collector.got)
