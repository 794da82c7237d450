"""The parts of `bench serve`: arrivals, prompts, answers read from bytes, and the figures made of them."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3hal.bench.serve.answers import Answer, read_answer
from k3hal.bench.serve.client import Exchange, Progress
from k3hal.bench.serve.dataset import arrivals, bodies, plan_requests
from k3hal.bench.serve.figures import busiest, figures, pace_delays, summarize
from k3hal.bench.serve.options import CHAT, ServeBench, read_dataset, read_goodput, read_rate
from k3hal.bench.serve.paced import PacedAnswers
from k3hal.bench.serve.progress import line
from k3hal.bench.serve.report import remarks
from k3hal.bench.serve.scrape import Queue, queue_figures
from k3hal.errors import UsageError

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def _event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def _chunked(*pieces: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def _text(text: str, finish: str | None = None) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


WHOLE = [
    b": keep-alive\n\n",
    _event(_text("a")),
    _event({"choices": [{"delta": {"reasoning_content": "b"}, "finish_reason": None}]}),
    _event({"choices": [{"delta": {"content": "ü"}, "finish_reason": None}]}),
    _event(_text("", "length")),
    _event({"choices": [], "usage": USAGE}),
    _event(b"[DONE]"),
]


def _exchange(raw: bytes, cuts: list[int] | None = None) -> Exchange:
    """An exchange whose bytes came in parts cut at these places, part number i at second i + 1."""
    places = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts or [])})
    parts = [raw[a:b] for a, b in pairwise(places)]
    return Exchange(0.0, 0.0, 0.5, [float(i + 1) for i in range(len(parts))], parts)


@given(st.lists(st.integers(0, 10_000), max_size=8))
def test_an_answer_reads_the_same_however_its_bytes_come(cuts: list[int]) -> None:
    answer = read_answer(_exchange(_chunked(*WHOLE), cuts))
    assert (answer.status, answer.error, answer.texts) == (200, "", ["a", "b", "ü"])
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (7, 3, 2)
    assert answer.at == sorted(answer.at) and answer.end >= answer.at[-1]


@given(st.integers(0, len(_chunked(*WHOLE)) - 1))
def test_an_answer_cut_off_anywhere_is_a_failure(length: int) -> None:
    assert read_answer(_exchange(_chunked(*WHOLE)[:length])).error


def test_each_piece_has_the_time_of_the_read_that_completed_it() -> None:
    raw = _chunked(*WHOLE)
    inside = raw.index(b'"a"')
    assert read_answer(_exchange(raw, [inside])).at == [2.0, 2.0, 2.0]
    first, last = raw.index(b": keep"), raw.index(b"ength")
    answer = read_answer(_exchange(raw, [first, last]))
    assert (answer.at, answer.end) == ([2.0, 2.0, 2.0], 3.0)
    assert answer.ttft == 1.5 and answer.e2el == 2.5 and answer.tpot == 0.5


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", "the connection closed without an answer"),
        (b"SSH-2.0\r\n\r\n", "the answer is not HTTP"),
        (b"HTTP/1.1 429 Too\r\n\r\n" + b'{"error": {"message": "full\\nup"}}', "HTTP 429: full up"),
        (b"HTTP/1.1 502 Bad\r\n\r\n<html>", "HTTP 502"),
        (HEAD + b"zz\r\n", "the answer is cut off"),
        (_chunked(_event(_text("a"))), "the stream is cut off"),
        (_chunked(_event(b"{")), "an event is not JSON"),
        (_chunked(_event([1])), "stream error: [1]"),
        (_chunked(_event({"choices": [3]})), "an event is not a chunk of a completion"),
        (_chunked(_event({"usage": {"total": 3}})), "an event is not a chunk of a completion"),
        (_chunked(_event(_text("a")), _event({"error": {"message": "gone"}})), "stream error: gone"),
    ],
)
def test_what_is_no_whole_answer_says_why(raw: bytes, error: str) -> None:
    assert read_answer(_exchange(raw)).error == error


def test_a_broken_connection_explains_a_missing_answer_but_does_not_spoil_a_whole_one() -> None:
    cut, whole = _exchange(_chunked(*WHOLE)[:90]), _exchange(_chunked(*WHOLE))
    cut.broken = whole.broken = "connection lost: reset"
    assert read_answer(cut).error == "connection lost: reset"
    assert read_answer(whole).error == ""


@given(st.integers(2, 200), st.floats(0.1, 1e4), st.floats(0.2, 50), st.integers(0, 2**32))
def test_arrivals_keep_their_rate(count: int, rate: float, burstiness: float, seed: int) -> None:
    times = arrivals(count, rate, burstiness, np.random.default_rng(seed))
    assert len(times) == count and times[0] == 0 and times == sorted(times)
    assert times[-1] == pytest.approx((count - 1) / rate)


def test_smoother_arrivals_are_more_even() -> None:
    gaps = [np.diff(arrivals(2000, 10, b, np.random.default_rng(1))) for b in (0.5, 1.0, 8.0)]
    spreads = [float(gap.std() / gap.mean()) for gap in gaps]
    assert spreads == pytest.approx([math.sqrt(2), 1.0, math.sqrt(1 / 8)], rel=0.1)
    assert arrivals(3, math.inf, 1.0, np.random.default_rng(1)) == [0.0, 0.0, 0.0]


def test_the_same_seed_asks_the_same() -> None:
    settings = ServeBench(num_prompts=3, input_len=5, output_len=2, request_rate=4.0, goodput={}, seed=7)
    again, other = plan_requests(settings), plan_requests(ServeBench(**{**_fields(settings), "seed": 8}))
    planned = plan_requests(settings)
    assert [p.due for p in planned] == [p.due for p in again] != [p.due for p in other]
    sent = [json.loads(body) for body in bodies(planned, settings, "k3")]
    assert sent == [json.loads(body) for body in bodies(again, settings, "k3")]
    assert [len(body["prompt"]) for body in sent] == [5, 5, 5] and sent[0]["prompt"] != sent[1]["prompt"]
    assert sent[0]["max_tokens"] == 2 and sent[0]["stream"] and sent[0]["ignore_eos"]
    assert max(max(body["prompt"]) for body in sent) < 256


def _fields(settings: ServeBench) -> dict:
    return {name: getattr(settings, name) for name in ServeBench.__slots__}


def test_a_chat_asks_with_one_word_a_token() -> None:
    settings = ServeBench(endpoint=CHAT, num_prompts=1, input_len=40, goodput={})
    body = json.loads(next(bodies(plan_requests(settings), settings, "k3")))
    words = body["messages"][0]["content"].split(" ")[1:]
    assert len(words) == 40 and set(words) == {"the", "and"}


def test_a_trace_keeps_its_times_and_its_shared_prefixes(tmp_path) -> None:
    lines = [
        {"timestamp": 500, "input_length": 700, "output_length": 4, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 1000, "output_length": 6, "hash_ids": [0, 2]},
        {"timestamp": 1500, "input_length": 10, "output_length": 0, "hash_ids": [5]},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = ServeBench(dataset=read_dataset(f"trace:{tmp_path / 't.jsonl'}"), goodput={})
    first, second, third = plan_requests(settings)
    assert [p.due for p in (first, second, third)] == [0.0, 1.0, 1.0]
    assert [p.output_len for p in (first, second, third)] == [4, 6, 1]
    a, b = first.prompt(), second.prompt()
    assert (len(a), len(b)) == (700, 1000) and a[:512] == b[:512] and a[512:700] != b[512:700]
    assert len(set(a)) > 100 and max(a + b) < 256
    faster = plan_requests(ServeBench(**{**_fields(settings), "request_rate": 100.0, "num_prompts": 2}))
    assert [p.due for p in faster] == [0.0, pytest.approx(0.01)]


def test_a_trace_that_waits_for_answers_is_refused() -> None:
    with pytest.raises(UsageError, match="wait for answers"):
        plan_requests(ServeBench(dataset="trace:agentic:1", goodput={}))


def _answer(sent: float, at: list[float], texts: list[str], error: str = "", due: float = 0.0) -> Answer:
    end = at[-1] if at else sent
    return Answer(due, 0.0, sent, 200, error, at, texts, end, 10, len(at))


def test_figures_have_the_names_and_units_of_vllm() -> None:
    answers = [
        _answer(0.0, [0.1, 0.2, 0.4], ["a", "b", "c"]),
        _answer(1.0, [1.3], ["a"], due=0.9),
        _answer(1.0, [], [], "HTTP 429: full"),
    ]
    report = figures(answers, 2.0, {"ttft": 150.0, "tpot": 200.0})
    assert (report["completed"], report["failed"], report["error_counts"]) == (2, 1, {"HTTP 429: full": 1})
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (20, 4)
    assert (report["request_throughput"], report["output_throughput"]) == (1.0, 2.0)
    assert report["total_token_throughput"] == 12.0
    assert report["mean_ttft_ms"] == pytest.approx(200) and report["p99_ttft_ms"] == pytest.approx(298)
    assert report["mean_tpot_ms"] == pytest.approx(150)
    assert report["median_itl_ms"] == pytest.approx(150) and report["std_itl_ms"] == pytest.approx(50)
    assert report["p95_e2el_ms"] == pytest.approx(395)
    assert report["request_goodput"] == 0.5 and report["goodput_share"] == pytest.approx(1 / 3)
    assert report["p99_client_late_ms"] > 90


def test_nothing_measured_is_null_and_not_zero() -> None:
    report = figures([_answer(0.0, [], [], "broken")], 1.0, {})
    assert report["mean_ttft_ms"] is None and report["p99_itl_ms"] is None and report["request_goodput"] is None
    assert report["max_concurrent_requests"] == 0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 10)), min_size=1, max_size=20))
def test_no_more_are_open_than_ever_overlap(spans: list[tuple[float, float]]) -> None:
    most = busiest([_answer(start, [start + length], ["x"]) for start, length in spans])["max_concurrent_requests"]
    overlaps = max(sum(a <= start < a + length for a, length in spans) for start, _ in spans)
    assert most == overlaps


def test_delays_over_the_pace_add_up_and_joined_tokens_count_each() -> None:
    steady = _answer(0.0, [1.0, 1.1, 1.2], ["a", "b", "c"])
    assert pace_delays([steady], 0.1) == pytest.approx([0, 0, 0])
    slow = _answer(0.0, [1.0, 1.2, 1.4], ["a", "b", "c"])
    assert pace_delays([slow], 0.1) == pytest.approx([0, 0.1, 0.2])
    late_start = _answer(0.0, [1.05, 1.1, 1.2], ["a", "b", "c"])
    assert pace_delays([late_start], 0.1) == pytest.approx([0.05, 0, 0])
    joined = _answer(0.0, [1.0, 1.2], ["a", "bc"])
    assert pace_delays([joined], 0.1) == pytest.approx([0, 0.1, 0])
    assert len(pace_delays([], 0.1)) == 0


def test_lost_doubled_and_swapped_tokens_are_noticed() -> None:
    paced = PacedAnswers(3, 50, seed=1)
    one, two, three = paced.texts
    assert paced.wrong([_answer(0, [1.0], [text]) for text in (one, two, three)]) == 0
    for bad in (one[1:], one[:20] + one[19:], one[:20] + two[20:], ""):
        assert paced.wrong([_answer(0, [1.0], [text]) for text in (bad, two)]) == 1
    assert paced.wrong([_answer(0, [1.0], [text]) for text in (one, one)]) == 1
    assert paced.wrong([_answer(0, [1.0], ["x"], "HTTP 500")]) == 0


def test_queue_times_are_those_between_two_scrapes() -> None:
    before, after = Queue({0.1: 5, 1.0: 5, math.inf: 5}, 0.2), Queue({0.1: 5, 1.0: 9, math.inf: 9}, 2.2)
    report = queue_figures(before, after)
    assert report["mean_queue_time_ms"] == pytest.approx(500)
    assert report["p50_queue_time_ms"] == pytest.approx(550) and report["p99_queue_time_ms"] == pytest.approx(991)
    assert set(queue_figures(after, after).values()) == {None} == set(queue_figures(None, after).values())


@pytest.mark.parametrize(
    "word", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", ":5", "ttft:0"]
)
def test_objectives_that_mean_nothing_are_refused(word: str) -> None:
    assert read_goodput(["ttft:500 tpot:50", "e2el:9e3"]) == {"ttft": 500.0, "tpot": 50.0, "e2el": 9000.0}
    with pytest.raises(UsageError, match="--goodput holds"):
        read_goodput(["tpot:5", word])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_url": "localhost:8000"}, "--base-url is"),
        ({"base_url": "http://[::1"}, "--base-url is"),
        ({"base_url": "http://h:99999"}, "--base-url is"),
        ({"base_url": "http://h/\r\nX: y"}, "--base-url is"),
        ({"base_url": "http://h", "paced": 20.0}, "--paced starts a server of its own"),
        ({"paced": 0.0}, "--paced is 0"),
        ({"paced": 20.0, "model": "m"}, "without a model"),
        ({"endpoint": "/v1/embeddings"}, "--endpoint is"),
        ({"num_prompts": 0}, "--num-prompts is 0"),
        ({"concurrency": 0}, "--concurrency is 0"),
        ({"warmups": -1}, "--num-warmups is -1"),
        ({"burstiness": math.nan}, "--burstiness is nan"),
        ({"timeout": math.inf}, "--timeout is inf"),
        ({"server_pid": 3}, "--server-pid belongs"),
    ],
)
def test_a_load_that_cannot_be_is_refused(fields: dict, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        ServeBench(goodput={}, **fields)
    assert message in str(refusal.value)


@pytest.mark.parametrize("text", ["0", "-1", "nan", "fast", ""])
def test_a_rate_is_positive_or_inf(text: str) -> None:
    assert read_rate(None) is None and read_rate("inf") == math.inf and read_rate("2.5") == 2.5
    with pytest.raises(UsageError, match="--request-rate"):
        read_rate(text)


@pytest.mark.parametrize("text", ["", "random", "trace", "trace:", "synthetic:3"])
def test_a_dataset_is_synthetic_or_a_trace(text: str) -> None:
    with pytest.raises(UsageError, match="--dataset is"):
        read_dataset(text)


def test_the_bar_shows_answered_and_running() -> None:
    assert (
        line(Progress(10, begun=5, done=2), 3.2) == f"[{'#' * 6}{'-' * 9}{' ' * 15}] 2 of 10 answered, 3 running, 3 s"
    )


def test_a_report_says_what_not_to_trust() -> None:
    fine = {"request_rate": 5.0, "client_cpu_share": 0.1, "wrong_answers": 0, "error_counts": {}}
    fine |= summarize("client_late", [0.001])
    assert remarks(fine) == []
    bad = fine | summarize("client_late", [0.05]) | {"client_cpu_share": 0.9, "wrong_answers": 2}
    assert [text.split(":")[0] for text in remarks(bad | {"error_counts": {"HTTP 500": 3}})] == [
        "The client itself was late",
        "The client used 90 % of a core",
        "2 answers lost, doubled or mixed up tokens.",
        "3 failed",
    ]
