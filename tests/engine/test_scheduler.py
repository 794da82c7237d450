"""Order, budget, fairness and refusals of the scheduler."""

from __future__ import annotations

import pytest

from k3hal.engine.interface import EngineRequest
from k3hal.errors import QueueFullError, RequestError
from k3hal.sampling_params import SamplingParams

from .fold_model import VOCAB
from .harness import Harness, greedy_by_hand

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_decodes_go_first_and_a_prompt_takes_the_rest_of_the_budget() -> None:
    harness = Harness(max_num_batched_tokens=6)
    harness.add("decoding", [2, 3], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    harness.step()
    harness.add("long", [4] * 13, GREEDY)
    chunks = []
    for _ in range(3):
        scheduled = harness.scheduler.schedule()
        assert scheduled is not None
        plan, requests = scheduled
        assert requests[0].id == "decoding"
        assert plan.num_tokens <= 6
        chunks.append(plan.new_lens.tolist())
        result = harness.runner.execute(plan)
        for request, token in zip(harness.scheduler.advance(plan, requests), result.token_ids, strict=True):
            request.append(token)
    assert chunks == [[1, 5], [1, 5], [1, 3]]


def test_a_prompt_chunk_of_one_token_runs_as_a_decode() -> None:
    harness = Harness(max_num_batched_tokens=4)
    harness.add("a", [2, 3, 4, 5, 6], GREEDY)
    harness.step()
    scheduled = harness.scheduler.schedule()
    assert scheduled is not None
    assert (scheduled[0].num_decodes, scheduled[0].sampled.tolist()) == (1, [0])


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 64])
def test_chunk_sizes_change_nothing(budget: int) -> None:
    harness = Harness(max_num_seqs=1, max_num_batched_tokens=budget)
    prompt = [i % VOCAB for i in range(2, 30)]
    harness.add("a", prompt, GREEDY)
    harness.run()
    assert harness.tokens("a") == greedy_by_hand(prompt, GREEDY, 36)[0]


def test_equal_priorities_start_in_order_of_arrival_and_lower_numbers_first() -> None:
    harness = Harness(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 0), ("late", 1), ("c", 0), ("urgent", -1)):
        harness.add(name, [2, 3], GREEDY, priority)
    harness.run()
    timings = {name: outputs[-1].timing for name, outputs in harness.outputs.items()}
    started = {name: timing.scheduled for name, timing in timings.items() if timing is not None}
    assert sorted(started, key=started.__getitem__) == ["urgent", "a", "b", "c", "late"]


def test_nobody_of_equal_priority_starves_under_steady_arrivals() -> None:
    """A request too large to run beside others still gets its turn: those behind it wait."""
    harness = Harness(num_runs=9, max_num_seqs=4)
    small = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    harness.add("s0", [2, 3], small)
    harness.step()
    harness.add("large", [5] * 50, GREEDY)
    for i in range(1, 60):
        harness.add(f"s{i}", [2, 3], small)
        harness.step()
        if harness.outputs["large"] and harness.outputs["large"][-1].finish_reason:
            break
    assert harness.reason("large") == "length"


def test_the_preempted_request_is_the_last_and_resumes_first() -> None:
    harness = Harness(num_runs=7, max_num_seqs=3)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for name in ("a", "b", "c"):
        harness.add(name, [ord(name) % VOCAB] * 3, params)
    while not harness.scheduler.preemptions:
        harness.step()
    assert [r.id for r in harness.scheduler.waiting] == ["c"]
    harness.add("d", [2], params)
    assert [r.id for r in harness.scheduler.waiting] == ["c", "d"]
    harness.run()
    harness.assert_clean()
    for name in ("a", "b", "c"):
        assert harness.tokens(name) == greedy_by_hand([ord(name) % VOCAB] * 3, params, 61)[0]


def test_a_full_queue_refuses_and_free_rows_do_not_count_as_waiting() -> None:
    harness = Harness(max_num_seqs=2, max_queue=1)
    for i in range(3):
        harness.add(f"r{i}", [2, 3], GREEDY)
    with pytest.raises(QueueFullError, match="3 requests are waiting"):
        harness.add("r3", [2, 3], GREEDY)
    harness.step()
    with pytest.raises(QueueFullError, match="1 requests are waiting"):
        harness.add("r3", [2, 3], GREEDY)
    harness.run()
    harness.add("r3", [2, 3], GREEDY)


def test_without_a_queue_the_refusal_says_so() -> None:
    harness = Harness(max_num_seqs=2, max_queue=0)
    said = "max_num_seqs 2 requests are under way, and max_queue 0 lets no other wait"
    for i in range(2):
        harness.add(f"r{i}", [2, 3], GREEDY)
    for _ in range(2):
        with pytest.raises(QueueFullError, match=said):
            harness.add("r2", [2, 3], GREEDY)
        harness.step()
    harness.run()
    harness.add("r2", [2, 3], GREEDY)


def test_abort_while_waiting_running_and_unknown() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add("running", [2, 3], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    harness.add("waiting", [2, 3], GREEDY)
    harness.step()
    outputs = harness.keep(harness.core.abort(["waiting", "running", "nobody", "running"]))
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("waiting", "abort"), ("running", "abort")]
    assert outputs[0].timing is not None
    assert outputs[0].timing.scheduled == 0.0
    harness.assert_clean()
    assert not harness.core.has_work


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([VOCAB], {}, f"token id {VOCAB} is outside"),
        ([-1], {}, "token id -1 is outside"),
        ([2] * 64, {}, "takes at most 63"),
        ([2.5], {}, "integer token ids"),
        (["a"], {}, "integer token ids"),
        ([[2, 3]], {}, "flat list"),
        ([[2], [3, 4]], {}, "flat list"),
        ([2], {"stop_token_ids": (VOCAB,)}, f"stop_token_ids holds {VOCAB}"),
        ([2], {"logit_bias": {VOCAB: 1.0}}, f"logit_bias holds {VOCAB}"),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt: list[int], params: dict, message: str) -> None:
    harness = Harness()
    with pytest.raises(RequestError, match=message):
        harness.add("bad", prompt, SamplingParams(**params))
    assert harness.scheduler.idle


def test_a_request_larger_than_the_cache_is_refused_by_name() -> None:
    harness = Harness(num_runs=4)
    with pytest.raises(RequestError, match="the 24 tokens that the cache holds") as caught:
        harness.add("large", [2] * 20, SamplingParams(max_tokens=6))
    assert caught.value.param == "max_tokens"
    harness.add("just fits", [2] * 20, SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    harness.run()
    assert harness.reason("just fits") == "length"


def test_an_id_in_use_is_refused() -> None:
    harness = Harness()
    harness.add("a", [2], GREEDY)
    with pytest.raises(RequestError, match="'a' is already in use"):
        harness.core.add(EngineRequest("a", [3], GREEDY))


def test_output_ends_with_the_context() -> None:
    harness = Harness(max_model_len=8)
    harness.add("a", [2] * 5, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    harness.run()
    assert len(harness.tokens("a")) == 3
    assert harness.reason("a") == "length"


def test_stats_count_prompts_once_however_often_they_run() -> None:
    harness = Harness(num_runs=9, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for i in range(4):
        harness.add(f"r{i}", [i + 2] * 5, params)
    harness.run()
    stats = harness.core.stats()
    assert stats.preemptions > 0
    assert (stats.prompt_tokens, stats.generation_tokens, stats.cached_prompt_tokens) == (20, 160, 0)
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
