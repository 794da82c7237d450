"""Where requests come from: files that are checked line by line, and generators that are the same everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3hal.bench.cache.agentic import agentic_trace
from k3hal.bench.cache.chat import ChatShape, chat_trace
from k3hal.bench.cache.mooncake import read_trace
from k3hal.bench.cache.sources import load_trace
from k3hal.bench.cache.trace import Trace
from k3hal.errors import InputError, UsageError

GOOD: dict[str, Any] = {"timestamp": 3, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 9]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_equal_ids_are_equal_blocks_and_nothing_else_is(tmp_path: Path) -> None:
    other = GOOD | {"timestamp": 1, "hash_ids": [4, 5, 10], "input_length": 1536}
    trace = read_trace(write(tmp_path / "t.jsonl", GOOD, "", other))
    assert [request.arrival for request in trace] == [0.001, 0.003], "sorted by arrival, seconds"
    second, first = (request.prompt() for request in trace)
    assert first.size == 1100 and second.size == 1536 and first.dtype == np.int64
    assert (first[:1024] == second[:1024]).all() and not np.isin(first[1024:], second).any()
    outputs = [request.output.tokens() for request in trace]
    assert [output.size for output in outputs] == [7, 7]
    assert not np.isin(outputs[0], outputs[1]).any() and not np.isin(outputs[0], first).any()
    assert max(output.max() for output in outputs) < 2**31


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", "a list"),
        ("[" * 5000, "not JSON"),
        ("9" * 5000, "not JSON"),
        (GOOD | {"timestamp": -1}, "timestamp is -1"),
        (GOOD | {"timestamp": "3"}, "timestamp is '3'"),
        (GOOD | {"timestamp": True}, "timestamp is True"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "timestamp is nan"),
        (GOOD | {"input_length": 0}, "input_length is 0"),
        (GOOD | {"input_length": 1100.0}, "input_length is 1100.0"),
        (GOOD | {"output_length": None}, "output_length is None"),
        (GOOD | {"input_length": 10**9}, "input_length is 1000000000"),
        (GOOD | {"hash_ids": [4, 5]}, "2 hash_ids for an input_length of 1100"),
        (GOOD | {"hash_ids": [4, 5, 5]}, "hash_ids repeat"),
        (GOOD | {"hash_ids": [4, 5, -1]}, "hash_ids is [4, 5, -1]"),
        (GOOD | {"hash_ids": "456"}, "hash_ids is '456'"),
        (GOOD | {"hash_ids": [4, 5, 2**40]}, "hash_ids is"),
        ({"timestamp": 0}, "input_length is None"),
    ],
)
def test_a_bad_line_is_named_in_one_line(tmp_path: Path, line: object, said: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, line)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert said in caught.value.message and f"{path}:2: " in caught.value.message
    assert "\n" not in str(caught.value) and len(caught.value.message) < 400


def test_a_file_without_requests_and_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no request"):
        read_trace(write(tmp_path / "t.jsonl", "", " "))
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path)
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_trace(tmp_path / "b.jsonl")


@pytest.mark.parametrize("source", ["agentic", "agentic:", "agentic:x", "chat:-1", "chat:1.5"])
def test_a_generator_wants_a_seed(source: str) -> None:
    with pytest.raises(UsageError, match="seed"):
        load_trace(source)


def test_the_public_trace_is_what_it_is_said_to_be(shared_data: Callable[[str], Path]) -> None:
    trace = read_trace(shared_data("synthetic_trace.jsonl"))
    assert (len(trace), trace.prompt_tokens, trace.output_tokens) == (3993, 61194628, 595432)


@pytest.mark.parametrize("make", [agentic_trace, lambda seed: chat_trace(seed, ChatShape.drawn(seed))])
def test_a_seed_is_a_trace(make: Callable[[int], Trace]) -> None:
    one, again, other = make(3), make(3), make(4)
    assert [r.arrival for r in one] == [r.arrival for r in again] != [r.arrival for r in other]
    assert all((a.prompt() == b.prompt()).all() for a, b in zip(one.requests[:40], again.requests[:40], strict=True))


def check_answers(trace: Trace) -> int:
    """Every answer sent again stands behind the prefix it was decoded behind; how many there are."""
    count = 0
    for index, request in enumerate(trace):
        assert list(request.boundaries) == sorted(set(request.boundaries))
        assert not request.boundaries or 0 < request.boundaries[0] <= request.boundaries[-1] <= request.prompt_tokens
        if request.after is not None:
            before = trace.requests[request.after]
            assert request.after < index and before.arrival < request.arrival
        if request.answer is not None:
            assert request.after is not None
            begin, end = request.answer
            before = trace.requests[request.after]
            whole = np.concatenate((before.prompt(), before.output.tokens()))
            assert begin == before.prompt_tokens and end == whole.size
            assert (request.prompt()[:end] == whole).all()
            count += 1
    return count


def test_agents_send_their_history_again(small_agents: Trace) -> None:
    assert check_answers(small_agents) > 20
    prompts = [request.prompt() for request in small_agents]
    system = min(request.boundaries[0] for request in small_agents)
    assert all((prompt[:system] == prompts[0][:system]).all() for prompt in prompts)
    turns = [request for request in small_agents if request.group is None]
    assert len(turns) == 3 * 12
    lengths = [request.prompt_tokens for request in turns]
    assert max(lengths) > 3 * min(lengths), "histories grow"


def test_sub_agents_come_two_to_eight_at_once_behind_one_history(small_agents: Trace) -> None:
    groups: dict[int, list[int]] = {}
    for index, request in enumerate(small_agents):
        if request.group is not None:
            groups.setdefault(request.group, []).append(index)
    assert len(groups) >= 3
    for members in groups.values():
        requests = [small_agents.requests[i] for i in members]
        assert 2 <= len(requests) <= 8 and len({r.arrival for r in requests}) == 1
        shared = sum(piece.size for piece in requests[0].pieces[:-2])
        first = requests[0].prompt()
        assert all((r.prompt()[:shared] == first[:shared]).all() for r in requests)


def test_chats_share_prompts_by_popularity() -> None:
    trace = chat_trace(1, ChatShape(requests=600, prompts=10, alone=0.3))
    assert check_answers(trace) > 50
    openings = [request.pieces[0].start for request in trace if request.after is None]
    counts = sorted((openings.count(start) for start in set(openings)), reverse=True)
    assert counts[0] > 3 * counts[8] and counts.count(1) > 50


def test_a_stripped_answer_is_no_answer() -> None:
    trace = chat_trace(1, ChatShape(requests=200, strip=50))
    assert all(request.answer is None for request in trace)
    follow = next(request for request in trace if request.after is not None)
    before = trace.requests[follow.after or 0]
    assert not np.isin(before.output.tokens()[:50], follow.prompt()).any()
