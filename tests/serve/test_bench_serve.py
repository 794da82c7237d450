"""`k3hal bench serve` against real servers: what it reports is what the servers did."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from k3hal.bench.save import save, tables_of
from k3hal.bench.serve.process import own_server
from k3hal.cli import main
from k3hal.errors import UnsupportedError


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """`bench(flags)`: exit code, stdout and stderr."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for a server that it starts

    def run(*flags: object) -> tuple[int, str, str]:
        code = main(["bench", "serve", *map(str, flags)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_run_reports_what_the_server_did(running, plain, bench, tmp_path: Path) -> None:
    lines = [plain("abcde"), plain("fghijk")]
    with running(lines) as server:
        flags = ["--base-url", server.url, "--num-prompts", 6, "--input-len", 9, "--output-len", 5]
        more = ["--goodput", "ttft:60000", "tpot:60000", "--save-detailed", "--plot", tmp_path / "p", "--json"]
        code, out, err = bench(*flags, *more, "--save", tmp_path / "r.json", "--num-warmups", 1)
        stats = server.engine.stats()
    report = json.loads(out)
    assert code == 0 and report == json.loads((tmp_path / "r.json").read_text())
    assert report["schema"] == "k3hal.bench_serve/1" and report["model_id"] == "k3"
    assert (report["completed"], report["failed"], report["num_prompts"]) == (6, 0, 6)
    assert report["total_input_tokens"] == 54 and report["input_lens"] == [9] * 6
    assert report["total_output_tokens"] == sum(report["output_lens"]) == 30 == stats.generation_tokens - 4
    assert sorted(report["generated_texts"]) == ["abcde"] * 3 + ["fghij"] * 3
    assert [len(itls) for itls in report["itls"]] == [4] * 6
    assert report["goodput_share"] == 1.0 and report["mean_queue_time_ms"] is not None
    assert 0 < report["mean_ttft_ms"] <= report["mean_e2el_ms"]
    assert report["request_rate"] == "inf" and report["server_cpu_us_per_token"] is None
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG" and "First token" in (tmp_path / "p.svg").read_text()
    assert "6 requests to" in err
    assert "whole answer" in tables_of(report)[0].text()
    save(report, tmp_path / "r.md")
    assert "<!-- table: serve k3 all at once -->" in (tmp_path / "r.md").read_text()


def test_a_chat_counts_thinking_and_content(running, turn, bench) -> None:
    with running([turn("plan", "answer")]) as server:
        flags = ["--base-url", server.url, "--endpoint", "/v1/chat/completions", "--num-prompts", 2]
        code, out, _ = bench(*flags, "--save-detailed", "--json", "--num-warmups", 0)
    report = json.loads(out)
    # A replay goes on after its end-of-message only while ids are left, and none are.
    assert code == 0 and report["generated_texts"] == ["plananswer"] * 2
    assert report["backend"] == "openai-chat"


def test_requests_come_at_their_rate_and_not_beyond_the_limit(running, plain, bench) -> None:
    with running([plain("ab", step_s=0.02)]) as server:
        flags = ["--base-url", server.url, "--num-prompts", 8, "--output-len", 2, "--json", "--save-detailed"]
        _, out, _ = bench(*flags, "--request-rate", 50)
        free = json.loads(out)
        _, out, _ = bench(*flags, "--concurrency", 2)
        held = json.loads(out)
    assert free["start_times"] == sorted(free["start_times"]) and free["start_times"][-1] >= 7 / 50
    assert free["request_rate"] == 50.0 and free["max_concurrency"] is None
    assert held["max_concurrent_requests"] <= 2 and held["max_concurrency"] == 2
    assert held["queue_times"][0] < held["queue_times"][-1]


def test_refused_requests_are_counted_by_what_they_were_told(running, plain, bench) -> None:
    with running([plain("abcdefgh", step_s=0.05)], {"max_num_seqs": 2, "max_queue": 2}) as server:
        flags = ["--base-url", server.url, "--num-prompts", 8, "--output-len", 8]
        code, out, _ = bench(*flags, "--json")
        report = json.loads(out)
        _, text, _ = bench(*flags)
    assert code == 1 and (report["completed"], report["failed"]) == (4, 4)
    assert sum(report["error_counts"].values()) == 4
    assert all(error.startswith("HTTP 429: 2 requests are waiting already") for error in report["error_counts"])
    assert "4 failed: HTTP 429" in text


def test_a_paced_server_loses_nothing(bench) -> None:
    flags = ["--paced", 200, "--num-prompts", 12, "--output-len", 30, "--input-len", 4, "--json"]
    code, out, _ = bench(*flags)
    report = json.loads(out)
    assert code == 0 and report["wrong_answers"] == 0 and report["total_output_tokens"] == 360
    assert report["p99_pace_delay_ms"] >= 0 and report["server_cpu_us_per_token"] > 0
    assert report["server_memory_after"] > 0


def test_a_key_is_asked_for_and_sent(running, plain, bench) -> None:
    with running([plain("ab")], api_keys=("secret",)) as server:
        flags = ["--base-url", server.url, "--num-prompts", 1]
        code, _, err = bench(*flags)
        assert code == 4 and "the server wants a key (401) (give --api-key)" in err
        assert bench(*flags, "--api-key", "secret")[0] == 0


@pytest.fixture
def odd_server() -> Iterator[Callable[[bytes], str]]:
    """`odd_server(bytes)`: the URL of something that answers every connection with these bytes and closes it."""
    socks: list[socket.socket] = []

    def start(answer: bytes) -> str:
        sock = socket.create_server(("127.0.0.1", 0))
        socks.append(sock)

        def serve() -> None:
            while True:
                try:
                    connection, _ = sock.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(0.3)
                    try:
                        if connection.recv(65536):
                            connection.sendall(answer)
                    except OSError:
                        continue

        threading.Thread(target=serve, daemon=True).start()
        return f"http://127.0.0.1:{sock.getsockname()[1]}"

    yield start
    for sock in socks:
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def test_servers_that_are_none_are_named(bench, odd_server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    code, _, err = bench("--base-url", f"http://127.0.0.1:{port}", "--num-prompts", 1)
    assert code == 4 and "Connection refused" in err
    code, _, err = bench("--base-url", odd_server(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n"))
    assert code == 4 and "lists no model (name one with --model)" in err
    code, _, err = bench("--base-url", odd_server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"), "--model", "m")
    assert code == 2 and "the first request was not answered: the stream is cut off" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["ttft:500"], "unexpected argument 'ttft:500'"),
        (["--goodput", "ttft:500", "speed:1"], "--goodput holds 'speed:1'"),
        (["--dataset", "sharegpt"], "--dataset is 'sharegpt'"),
        (["--dataset", "trace:none.jsonl"], "none.jsonl: cannot be read"),
        (["--paced", "20", "--model", "m"], "without a model"),
        (["--save", "r.txt"], "not a .json or .md file"),
        (["--base-url", "http://127.0.0.1:9", "--server-pid", "999999999"], "--server-pid 999999999"),
    ],
)
def test_bad_flags_are_one_line(bench, flags: list[str], message: str) -> None:
    code, out, err = bench(*flags)
    assert code == 4 and out == "" and message in err and err.count("\n") == 1


def test_a_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with (
        pytest.raises(UnsupportedError, match=r"the server did not start: .*tiktoken\.model"),
        own_server(["--engine", "replay:none.jsonl", "--tokenizer", str(tmp_path)]),
    ):
        pytest.fail("it did")
