"""The Python API on a real, small model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import k3hal
from k3hal import LLM, SamplingParams
from k3hal.dispatch.plan_file import save_plan, saved
from k3hal.dispatch.plan_pin import compare_plans
from k3hal.engine.build import build_engine
from k3hal.engine.memory import GB
from k3hal.errors import CapacityError, CheckpointError, K3HALError, RequestError, UsageError

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def token_ids(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params)[0].outputs[0].token_ids


def test_text_and_ids_are_the_same_prompt_and_outputs_keep_the_order(llm: LLM) -> None:
    texts = ["Hello world", "a", "The quick brown fox"]
    outputs = llm.generate(texts, GREEDY)
    assert [o.prompt_token_ids for o in outputs] == [llm.tokenizer.encode_ordinary(t) for t in texts]
    for text, output in zip(texts, outputs, strict=True):
        assert token_ids(llm, output.prompt_token_ids) == output.outputs[0].token_ids
        assert token_ids(llm, [output.prompt_token_ids]) == output.outputs[0].token_ids
        assert token_ids(llm, text) == output.outputs[0].token_ids
        assert output.outputs[0].finish_reason == "length"
        assert output.num_cached_tokens == 0
    assert llm.generate([], GREEDY) == []


def test_text_is_what_the_tokens_spell_without_specials(llm: LLM) -> None:
    output = llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))[0].outputs[0]
    plain = [t for t in output.token_ids if not llm.tokenizer.is_special(t)]
    assert output.text == llm.tokenizer.decode(plain)


def test_logits_agree_with_generation_and_with_any_chunking(llm: LLM, nano_dir: Path) -> None:
    prompt = [(7 * i) % 300 for i in range(90)]
    output = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=3))[0]
    answer = output.outputs[0]
    logits = llm.logits(prompt + answer.token_ids)
    assert (logits.dtype, logits.shape, logits.device.type) == (torch.float32, (95, 625), "cpu")
    raw = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    assert raw.argmax(-1).tolist() == answer.token_ids
    assert answer.logprobs is not None
    for row, token, logprob in zip(raw, answer.token_ids, answer.logprobs, strict=True):
        assert logprob.token_id == token
        assert logprob.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [t for t, _ in logprob.top] == row.topk(3).indices.tolist()
    with LLM(nano_dir, device="cpu", dtype="float32", max_model_len=512, max_num_batched_tokens=7) as chunked:
        torch.testing.assert_close(chunked.logits(prompt + answer.token_ids), logits, atol=1e-5, rtol=0)


def test_every_continuation_of_a_seeded_request_can_be_repeated_alone(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, temperature=1.0, max_tokens=8, ignore_eos=True)
    outputs = llm.generate(["Hello", "Hello"], params)
    assert [o.token_ids for o in outputs[0].outputs] == [o.token_ids for o in outputs[1].outputs]
    assert [o.index for o in outputs[0].outputs] == [0, 1, 2]
    assert len({tuple(o.token_ids) for o in outputs[0].outputs}) == 3
    for index, output in enumerate(outputs[0].outputs):
        single = SamplingParams(seed=11 + index, temperature=1.0, max_tokens=8, ignore_eos=True)
        assert token_ids(llm, "Hello", single) == output.token_ids


def test_without_a_seed_continuations_differ(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.5, max_tokens=8, ignore_eos=True)
    outputs = llm.generate("Hello", params)[0].outputs
    assert len({tuple(o.token_ids) for o in outputs}) > 1


def test_stop_strings_cut_the_text_wherever_tokens_end(llm: LLM) -> None:
    whole = llm.generate("Hello world", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))[0].outputs[0]
    assert len(whole.text) > 12
    stop = whole.text[6:9]
    at = whole.text.index(stop)
    asked = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=(stop,))
    cut = llm.generate("Hello world", asked)[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole.text[:at], "stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 30
    kept = llm.generate(
        "Hello world",
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=(stop,), include_stop_str_in_output=True),
    )[0].outputs[0]
    assert kept.text == whole.text[: at + 3]


def test_stop_ids_end_the_answer_and_stay_out_of_its_text(llm: LLM) -> None:
    whole = llm.generate("Hello world", GREEDY)[0].outputs[0]
    stop = whole.token_ids[3]
    first = whole.token_ids.index(stop)
    asked = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop_token_ids=(stop,))
    output = llm.generate("Hello world", asked)[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == whole.token_ids[: first + 1]
    waits = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop_token_ids=(stop,), min_tokens=first + 1)
    banned = llm.generate("Hello world", waits)[0].outputs[0]
    assert stop not in banned.token_ids[: first + 1]


def test_one_set_of_parameters_for_each_prompt(llm: LLM) -> None:
    each = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    outputs = llm.generate(["a", "b"], each)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 5]
    with pytest.raises(RequestError, match="2 prompts and 1 sampling parameters"):
        llm.generate(["a", "b"], each[:1])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1, 2], [625]], "token id 625 is outside the vocabulary of 625"),
        ([""], "the prompt is empty"),
        ([[]], "the prompt is empty"),
        ([[1] * 512], "the prompt has 512 tokens and the model takes at most 511"),
    ],
)
def test_a_bad_prompt_runs_nothing(llm: LLM, prompts: list[Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY)
    assert len(token_ids(llm, "Hello")) == 6


def test_an_interrupted_call_leaves_a_clean_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm._engine.engine.core
    step = core.step
    monkeypatch.setattr(core, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY)
    monkeypatch.setattr(core, "step", step)
    assert not core.has_work
    assert core.scheduler.cache.usage == 0.0


def test_chat_separates_thought_from_answer(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
    output = llm.chat(messages, params)
    assert output.outputs[0].reasoning
    assert len(output.outputs[0].token_ids) == 20
    plain = llm.chat(messages, params, thinking={"type": "disabled"})
    assert plain.outputs[0].reasoning is None
    assert plain.outputs[0].text
    assert plain.prompt_token_ids != output.prompt_token_ids
    with pytest.raises(RequestError, match="messages"):
        llm.chat([{"role": "nobody", "content": "Hi"}], params)


def test_a_mistyped_render_option_is_named(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(UsageError, match=r"unknown render option 'thinkng'.*did you mean 'thinking'"):
        llm.chat(messages, GREEDY, thinkng=False)
    with pytest.raises(RequestError, match="params is 'greedy'"):
        llm.chat(messages, "greedy")  # pyright: ignore[reportArgumentType]


def test_plan_says_what_runs(llm: LLM) -> None:
    entries = {entry.request.op: entry.decision for entry in llm.plan.entries}
    assert {"kda_decode", "mla_decode", "sample", "step_metadata"} <= set(entries)
    assert llm.plan.dtype == "float32"
    assert all(decision.trace for decision in entries.values())


def test_a_saved_plan_runs_the_same_providers(llm: LLM, nano_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(llm.plan, path)
    with LLM(nano_dir, device="cpu", dtype="float32", plan=path, max_model_len=64) as pinned:
        assert compare_plans(saved(llm.plan), saved(pinned.plan)) == ()
        assert token_ids(pinned, "Hello") == token_ids(llm, "Hello")


def test_closing(nano_dir: Path) -> None:
    with LLM(nano_dir, device="cpu", dtype="float32", max_model_len=64) as model:
        assert model.max_model_len == 64
    model.close()
    with pytest.raises(UsageError, match="this LLM is closed"):
        model.generate("Hello")


def test_refusals_come_before_the_weights(nano_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr("k3hal.engine.build.K3Model.load", load)
    with pytest.raises(CapacityError, match="GB are missing"):
        LLM(nano_dir, device="cpu", memory_budget=0.01)
    with pytest.raises(K3HALError, match="no_such_backend"):
        LLM(nano_dir, device="cpu", ops="rms_norm=no_such_backend")
    with pytest.raises(UsageError, match="ops and plan both"):
        LLM(nano_dir, device="cpu", ops="rms_norm=reference", plan="plan.json")
    with pytest.raises(CheckpointError, match="cannot read the tokenizer"):
        LLM(nano_dir, device="cpu", tokenizer=nano_dir.parent)


def test_real_sequences_are_independent_of_batch_chunks_and_preemption(nano_dir: Path, llm: LLM) -> None:
    """Sequences that all outgrow their page in a cache too small for it, against each alone: the same tokens."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 300, n).tolist() for n in (121, 119, 120, 3, 122)]
    each = [
        SamplingParams(temperature=[0.0, 0.8][i % 2], top_p=0.9, seed=i, max_tokens=14, ignore_eos=True)
        for i in range(len(prompts))
    ]
    expected = [token_ids(llm, [prompt], params) for prompt, params in zip(prompts, each, strict=True)]
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 90}
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", **sizes}
    memory = build_engine(str(nano_dir), **options).memory
    run = memory.cache // memory.num_runs
    budget = (memory.needs.total + 9 * run) / GB
    with LLM(nano_dir, memory_budget=budget + 1e-9, **options) as tight:
        outputs = tight.generate(prompts, each)
        stats = tight._engine.engine.stats()
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert stats.preemptions > 0


def test_public_names_load_lazily() -> None:
    assert k3hal.LLM is LLM
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        k3hal.nothing  # noqa: B018
    code = "import sys, k3hal; k3hal.SamplingParams(); assert not {'torch', 'numpy'} & set(sys.modules)"
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-P", "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
