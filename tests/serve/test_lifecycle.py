"""A server under pressure: keys, full queues, clients that leave, shutdown, and the command itself."""

import asyncio
import json
import re
import signal
import socket
import threading
import time
from dataclasses import replace

import httpx
import pytest

from k3hal.engine.interface import EngineRequest
from k3hal.engine.replay import ReplayEngine
from k3hal.engine.replay_file import ReplayLine
from k3hal.errors import DrainingError
from k3hal.model.synthetic_vocab import synthetic_ranks
from k3hal.sampling_params import SamplingParams
from k3hal.serve.app import create_app
from k3hal.serve.http_io import KEEP_ALIVE
from k3hal.serve.state import ServerConfig, ServerState
from k3hal.tokenizer import Tokenizer

TOKENIZER = Tokenizer(synthetic_ranks())
HELLO = TOKENIZER.encode_ordinary("Hello")[0]
SLOW = ReplayLine((HELLO,) * 10_000, step_s=0.01)
STUCK = ReplayLine((HELLO,), step_s=600)
BODY = {"prompt": "x", "max_tokens": 5000}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def eventually(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def test_api_keys_guard_v1_only(running, plain):
    with running([plain("a")], api_keys=("secret", "öther")) as server, server.client() as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"x-api-key": "secre"}):
            response = http.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert http.post("/v1/completions", content=b"{").status_code == 401
        for key in ("secret", "öther"):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert http.get("/v1/models", headers=headers).status_code == 200
            assert http.get("/v1/models", headers={"x-api-key": key.encode()}).status_code == 200
        assert [http.get(path).status_code for path in ("/health", "/metrics", "/ready")] == [200, 200, 200]


def test_a_full_queue_is_429_and_aborts_the_choices_already_queued(running):
    with running([STUCK], {"max_num_seqs": 1, "max_queue": 1}) as server, server.client() as http:
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}):
            eventually(lambda: server.engine.stats().num_running == 1)
            response = http.post("/v1/completions", json={**BODY, "n": 2})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "queue_full"
        eventually(lambda: server.engine.stats().num_running == 0)
        assert (
            'admission_rejections_total{engine="0",model_name="k3",reason="queue_full"} 1.0'
            in http.get("/metrics").text
        )


def test_a_request_of_more_choices_than_the_server_ever_holds_is_400(running):
    with running([STUCK], {"max_num_seqs": 1, "max_queue": 1}) as server, server.client() as http:
        response = http.post("/v1/completions", json={**BODY, "n": 3})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "3 choices of one request; the server holds 2 at most"


def test_request_ids_have_an_end(running, plain):
    with running([plain("a")]) as server, server.client() as http:
        assert http.post("/v1/completions", json={**BODY, "request_id": "r" * 256}).status_code == 200
        assert http.post("/v1/completions", json={**BODY, "request_id": "r" * 257}).status_code == 400


def test_bodies_beyond_the_limit_are_413(running, plain):
    with running([plain("a")], max_body_bytes=100) as server, server.client() as http:
        big = json.dumps({"prompt": "x" * 200}).encode()
        assert http.post("/v1/completions", content=big).status_code == 413
        assert http.post("/v1/completions", content=iter([big[:90], big[90:]])).status_code == 413
        assert http.post("/v1/completions", content=big[:0] + b'{"prompt": "x"}').status_code == 200


def test_compat_metrics_can_be_dropped(running, plain):
    with running([plain("a")], metrics_compat=False) as server, server.client() as http:
        text = http.get("/metrics").text
    assert "vllm:" not in text
    assert "k3hal_prompt_tokens_total" in text


def test_a_closed_stream_aborts_its_sequences(running):
    with running([SLOW]) as server, server.client() as http:
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True, "n": 2}) as response:
            events = response.iter_lines()
            next(events)
            assert server.engine.stats().num_running == 2
        eventually(lambda: server.engine.stats().num_running == 0, 1.0)
        assert "k3hal_client_disconnects_total{" in http.get("/metrics").text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token_is_noticed(running, stream):
    body = json.dumps({**BODY, "stream": stream}).encode()
    with running([STUCK]) as server:
        with socket.create_connection(server.url.removeprefix("http://").split(":")) as raw:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\n\r\n"
            raw.sendall(head.encode() + body)
            eventually(lambda: server.engine.stats().num_running == 1)
        eventually(lambda: server.engine.stats().num_running == 0, 1.0)


def test_a_stream_that_waits_sends_comments(running):
    body = {**CHAT, "stream": True}
    with (
        running([STUCK], keep_alive=0.05) as server,
        server.client() as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        chunks = response.iter_raw()
        assert next(chunks) == KEEP_ALIVE
        assert next(chunks) == KEEP_ALIVE


def drain(server):
    server.server.handle_exit(signal.SIGTERM, None)
    eventually(lambda: server.state.draining)


def test_draining_finishes_what_runs_and_refuses_the_rest(running, plain):
    lines = [plain("x" * 30, step_s=0.02)]
    with running(lines) as server, server.client() as http, server.client() as other:
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            events = response.iter_lines()
            next(events)
            drain(server)
            assert other.get("/ready").status_code == 503
            assert other.get("/health").status_code == 200
            refused = other.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            rest = list(events)
        assert rest[-2] == "data: [DONE]"
        eventually(lambda: server.server.should_exit)


def test_new_requests_are_answered_until_the_load_balancer_knows(running, plain):
    with running([plain("ab")], drain_delay=0.5) as server, server.client() as http:
        server.server.handle_exit(signal.SIGTERM, None)
        eventually(lambda: http.get("/ready").status_code == 503)
        assert http.post("/v1/completions", json=BODY).status_code == 200
        eventually(lambda: server.state.draining)
        eventually(lambda: server.server.should_exit)


def test_a_second_signal_ends_that_delay_too(running):
    with running([STUCK], drain_delay=600.0) as server:
        server.server.handle_exit(signal.SIGTERM, None)
        eventually(lambda: server.state.leaving)
        server.server.handle_exit(signal.SIGTERM, None)
        eventually(lambda: server.server.should_exit)


def test_an_engine_that_failed_for_good_is_not_healthy(running, monkeypatch):
    with running([SLOW]) as server, server.client() as http:
        stats = server.engine.stats()
        monkeypatch.setattr(server.engine, "stats", lambda: replace(stats, dead="out of memory"))
        assert (http.get("/health").status_code, http.get("/ready").status_code) == (503, 503)
        assert http.get("/health").json()["reason"] == "out of memory"


def test_what_does_not_finish_in_time_is_aborted_with_an_error(running):
    with running([STUCK], drain_timeout=0.1) as server, server.client() as http, server.client() as other:
        answers = []
        whole = threading.Thread(target=lambda: answers.append(other.post("/v1/completions", json=BODY)))
        whole.start()
        with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            eventually(lambda: server.engine.stats().num_running == 2)
            drain(server)
            lines = [line for line in response.iter_lines() if line]
        whole.join()
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["type"] == "unavailable_error"
        assert answers[0].status_code == 503


def test_a_second_signal_does_not_wait(running):
    with running([STUCK], drain_timeout=600.0) as server, server.client() as http:
        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            eventually(lambda: server.engine.stats().num_running == 1)
            drain(server)
            drain(server)
            assert "error" in response.read().decode()
        eventually(lambda: server.server.should_exit)


def test_the_server_is_ready_only_after_its_warm_up_request(running, plain):
    with running([plain("w", step_s=0.2), plain("a")], warm_up="quick") as server, server.client() as http:
        assert server.engine.stats().generation_tokens == 1
        assert http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == "a"


def test_a_failed_warm_up_leaves_the_server_unready_and_says_why(caplog):
    engine = ReplayEngine([STUCK], TOKENIZER)
    state = ServerState(engine, TOKENIZER, ServerConfig(model_names=("k3",)))

    async def start_and_abort():
        async with create_app(state).router.lifespan_context(None):
            await asyncio.sleep(0.05)
            state.router.abort_all()
            await asyncio.sleep(0.1)
            return state.ready

    assert asyncio.run(start_and_abort()) is False
    assert "the warm-up failed" in caplog.text


def test_many_clients_at_once_get_their_own_answers(running, plain):
    words = [f"answer {i}" for i in range(20)]
    with running([plain("x", per_step=2)]) as server, server.client() as http:

        def ask(i, out):
            response = http.post("/v1/completions", json={"prompt": words[i], "echo": True})
            out[i] = response.json()["choices"][0]["text"]

        out = {}
        threads = [threading.Thread(target=ask, args=(i, out)) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert out == {i: f"answer {i}x" for i in range(20)}


def test_the_engine_is_closed_with_the_server(running, plain):
    with running([plain("a")]) as server:
        pass
    with pytest.raises(DrainingError):
        server.engine.submit(EngineRequest("late", [1], SamplingParams()))


def test_the_command_serves_and_drains_on_sigterm(tmp_path, synthetic_dir, k3hal):
    replay = tmp_path / "r.jsonl"
    replay.write_text(json.dumps({"ids": [HELLO] * 20, "step_ms": 30}) + "\n")
    command = k3hal("serve", "--engine", f"replay:{replay}", "--tokenizer", synthetic_dir, "--port", "0",
                    "--served-model-name", "mine")  # fmt: skip
    try:
        assert command.process.stdout is not None
        line = command.process.stdout.readline()
        match = re.fullmatch(r"k3hal: serving mine on (http://127\.0\.0\.1:\d+) \(ready after [\d.]+ s\)\n", line)
        assert match, (line, command.process.poll())
        with httpx.stream("POST", f"{match[1]}/v1/completions", json={**BODY, "stream": True}, timeout=20) as response:
            events = response.iter_lines()
            next(events)
            command.process.send_signal(signal.SIGTERM)
            assert [line for line in events if line][-1] == "data: [DONE]"
        assert command.finish() == (0, "", "")
    finally:
        command.process.kill()
        command.finish()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--engine", "replay:FILE"], "needs a tokenizer"),
        (["--engine", "null", "--tokenizer", "DIR"], "unknown engine 'null'"),
        (["--engine", "replay:", "--tokenizer", "DIR"], "unknown engine 'replay:'"),
        (["--engine", "replay:NONE", "--tokenizer", "DIR"], "cannot read the replay file"),
        (["--engine", "replay:FILE", "--tokenizer", "NONE"], "cannot read the tokenizer"),
        (["--engine", "replay:FILE", "--tokenizer", "DIR", "--metrics-compat", "no"], "metrics-compat"),
        (["--engine", "replay:FILE", "--tokenizer", "DIR", "--port", "99999"], "port"),
        (["--engine", "replay:FILE", "--tokenizer", "DIR", "--host", "nowhere.invalid"], "cannot listen on nowhere"),
        (["--engine", "replay:FILE", "--tokenizer", "DIR", "--api-key", ""], "api-key.*empty"),
        (["--engine", "replay:FILE", "--tokenizer", "DIR", "--drain-timeout", "-1"], "drain-timeout"),
    ],
)
def test_command_line_mistakes_are_one_line_and_exit_4(tmp_path, synthetic_dir, capsys, args, message):
    from k3hal.cli import main

    (tmp_path / "FILE").write_text('{"ids": [1]}\n')
    places = {"DIR": synthetic_dir, "FILE": tmp_path / "FILE", "NONE": tmp_path / "none"}
    args = [re.sub("DIR|FILE|NONE", lambda found: str(places[found[0]]), arg) for arg in args]
    port = [] if "--port" in args else ["--port", "0"]
    assert main(["serve", *port, *args]) == 4
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.count("\n") == 1


def test_keys_come_from_a_config_file_and_the_environment(tmp_path, monkeypatch):
    from k3hal.cli import main, serve

    seen = []
    monkeypatch.setattr(serve, "_run", lambda settings, _: seen.append((settings.api_key, settings.cors_origin)))
    (tmp_path / "c.yaml").write_text("api-key: [from-file, too]\ncors-origin: https://a.test\n")
    config = ["--config", str(tmp_path / "c.yaml")]
    assert main(["serve", *config]) == 0
    assert main(["serve", *config, "--api-key", "flag"]) == 0
    monkeypatch.setenv("K3HAL_API_KEY", "variable")
    assert main(["serve", *config]) == 0
    origins = ["https://a.test"]
    assert seen == [(["from-file", "too"], origins), (["flag"], origins), (["variable"], origins)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ssl-keyfile", "k.pem"], "give --ssl-certfile"),
        (["--ssl-certfile", "none.pem"], "TLS cannot be set up with none.pem: No such file"),
        (["--api-key-file", "none"], "cannot read the API keys in none"),
        (["--log-level", "loud"], "log-level"),
        (["--warm-up", "hot"], "warm-up"),
        (["--requests-per-minute", "0"], "requests-per-minute"),
    ],
)
def test_mistakes_about_the_server_are_one_line_and_exit_4(tmp_path, synthetic_dir, capsys, args, message):
    from k3hal.cli import main

    (tmp_path / "r.jsonl").write_text('{"ids": [1]}\n')
    replay = ["--engine", f"replay:{tmp_path / 'r.jsonl'}", "--tokenizer", str(synthetic_dir), "--port", "0"]
    assert main(["serve", *replay, *args]) == 4
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_port_in_use_is_named(capsys, synthetic_dir):
    from k3hal.cli import main

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 4
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err
