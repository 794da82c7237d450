"""The nano model answers the same whether a prefix comes from the device, the host, the disk, or is computed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3hal.engine.tier.interface import TierStats
from k3hal.errors import CapacityError, UsageError
from k3hal.llm import LLM
from k3hal.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SIZES: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4}
CACHED: dict[str, Any] = {**SIZES, "prefix_match_unit": 64, "prefix_host_cache_gb": 0.2}
LENGTHS = (64, 65, 127, 128, 129, 200, 256, 385)


@pytest.fixture(scope="module")
def plain(nano_dir: Path) -> Iterator[LLM]:
    with LLM(nano_dir, **SIZES, prefix_cache_policy="none") as model:
        yield model


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 300, count).tolist()


def answer(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    (output,) = llm.generate([prompt], params)
    return output.outputs[0].token_ids, output.num_cached_tokens


def stats(llm: LLM) -> TierStats:
    found = llm._engine.engine.stats().tier
    assert found is not None
    return found


def lose_device_memory(llm: LLM) -> None:
    cache: Any = llm._engine.engine.core.scheduler.cache
    cache.index.clear()


@pytest.mark.parametrize("length", LENGTHS)
def test_every_hit_length_from_the_host(nano_dir: Path, plain: LLM, length: int) -> None:
    prompt = tokens(length, length)
    with LLM(nano_dir, **CACHED) as llm:
        first, none = answer(llm, prompt)
        lose_device_memory(llm)
        again, hit = answer(llm, prompt)
        assert stats(llm).hits == hit
    assert none == 0
    assert hit >= (length - 1) // 64 * 64
    assert first == again == answer(plain, prompt)[0]


def test_a_restart_finds_everything_on_the_disk(nano_dir: Path, plain: LLM, tmp_path: Path) -> None:
    prompts = [tokens(length, length) for length in LENGTHS]
    disk = {**CACHED, "prefix_disk_cache": tmp_path}
    with LLM(nano_dir, **disk) as llm:
        first = [answer(llm, prompt)[0] for prompt in prompts]
    with LLM(nano_dir, **disk) as llm:
        again = [answer(llm, prompt) for prompt in prompts]
        assert stats(llm).hits == sum(hit for _, hit in again)
    assert first == [said for said, _ in again] == [answer(plain, prompt)[0] for prompt in prompts]
    assert all(hit >= (len(p) - 1) // 64 * 64 for p, (_, hit) in zip(prompts, again, strict=True))


def test_a_conversation_goes_on_over_restarts(nano_dir: Path, plain: LLM, tmp_path: Path) -> None:
    history, known = tokens(1, 150), 0
    for turn in range(4):
        with LLM(nano_dir, **CACHED, prefix_disk_cache=str(tmp_path)) as llm:
            said, hit = answer(llm, history)
        assert said == answer(plain, history)[0]
        assert hit >= known
        known = len(history) + len(said) - 1
        history = [*history, *said, *tokens(turn + 2, 41)]
    assert known > 300


def test_a_fan_out_after_a_restart_shares_what_was_shared(nano_dir: Path, plain: LLM, tmp_path: Path) -> None:
    shared = tokens(5, 320)
    prompts = [[*shared, *tokens(10 + child, 70)] for child in range(6)]
    with LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path) as llm:
        said = [answer(llm, prompt)[0] for prompt in prompts[:3]]
    with LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path) as llm:
        outputs = llm.generate(prompts, GREEDY)
        assert stats(llm).loads >= 1
    assert all(output.num_cached_tokens >= 320 for output in outputs)
    assert said == [output.outputs[0].token_ids for output in outputs[:3]]
    assert [output.outputs[0].token_ids for output in outputs] == [answer(plain, prompt)[0] for prompt in prompts]


def test_an_edit_in_the_middle_resumes_before_it(nano_dir: Path, plain: LLM, tmp_path: Path) -> None:
    prompt = tokens(6, 500)
    with LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path) as llm:
        answer(llm, prompt)
    for place in (100, 333):
        edited = [*prompt[:place], (prompt[place] + 1) % 300, *prompt[place + 1 :]]
        with LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path) as llm:
            said, hit = answer(llm, edited)
        assert said == answer(plain, edited)[0]
        assert hit <= place


def test_a_prompt_beyond_host_memory_costs_nobody_else(nano_dir: Path) -> None:
    small, large = tokens(8, 130), tokens(9, 900)
    with LLM(nano_dir, **{**CACHED, "prefix_host_cache_gb": 0.005}) as llm:
        answer(llm, small)
        answer(llm, large)
        assert stats(llm).stores_dropped > 0
        lose_device_memory(llm)
        assert answer(llm, small)[1] >= 128


def test_a_prompt_beyond_the_disk_budget_costs_nobody_else(nano_dir: Path, tmp_path: Path) -> None:
    small, large = tokens(8, 130), tokens(9, 900)
    disk = {**CACHED, "prefix_disk_cache": tmp_path, "prefix_disk_cache_gb": 0.005}
    with LLM(nano_dir, **disk) as llm:
        answer(llm, small)
        answer(llm, large)
    with LLM(nano_dir, **disk) as llm:
        assert answer(llm, small)[1] >= 128


def test_preempted_sequences_resume_from_the_host(nano_dir: Path, plain: LLM) -> None:
    prompts = [[*tokens(7, 100), *tokens(20 + i, 60 * i)] for i in range(4)]
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    with LLM(nano_dir, **CACHED, memory_budget=0.0312) as tight:
        said = [output.outputs[0].token_ids for output in tight.generate(prompts, long)]
        assert tight._engine.engine.stats().preemptions > 0
        assert stats(tight).queries > sum(map(len, prompts)), "who came back did not ask"
    assert said == [output.outputs[0].token_ids for output in plain.generate(prompts, long)]


def test_a_damaged_file_is_computed_anew(
    nano_dir: Path, plain: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = tokens(8, 300)
    with LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path) as llm:
        answer(llm, prompt)
    for path in tmp_path.glob("*/objects/*/*.k3obj"):
        data = bytearray(path.read_bytes())
        data[-5000] ^= 1
        path.write_bytes(data)
    with LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path) as llm, caplog.at_level(logging.WARNING):
        said, hit = answer(llm, prompt)
        assert hit == 0
        assert stats(llm).failures["corrupt"] == 1
        lose_device_memory(llm)
        assert answer(llm, prompt)[1] > 0, "it was stored anew"
    assert said == answer(plain, prompt)[0]
    assert "does not match its checksum" in caplog.text


def test_a_file_cut_short_is_removed_at_the_start(nano_dir: Path, plain: LLM, tmp_path: Path) -> None:
    prompt = tokens(12, 300)
    with LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path) as llm:
        answer(llm, prompt)
    paths = list(tmp_path.glob("*/objects/*/*.k3obj"))
    for path in paths:
        path.write_bytes(path.read_bytes()[:-1])
    with LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path) as llm:
        assert stats(llm).damaged == len(paths) > 0
        assert answer(llm, prompt) == (answer(plain, prompt)[0], 0)


def test_tenants_share_nothing_over_the_tier(nano_dir: Path, tmp_path: Path) -> None:
    from k3hal.engine.interface import EngineRequest, PrefixContext

    prompt = tokens(9, 200)
    with LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path) as llm:
        core = llm._engine.engine.core
        hits = []
        for number, salt in enumerate(["a", "b", "a", "", "b"]):
            core.add(EngineRequest(str(number), prompt, GREEDY, context=PrefixContext(salt=salt)))
            last = None
            while core.has_work:
                last = (core.step() or [last])[-1]
            assert last is not None
            hits.append(last.num_cached_tokens)
            lose_device_memory(llm)
    assert hits == [0, 0, 192, 0, 192]


def test_another_models_files_are_not_found(nano_dir: Path, tmp_path: Path) -> None:
    prompt = tokens(10, 200)
    with LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path) as llm:
        answer(llm, prompt)
    changed = (
        {"mla_latent_norm_eps": 1e-5}, {"prefix_match_unit": 128}, {"ops": "rms_norm=reference"},
        {"expert_activations": "mxfp8"},
    )  # fmt: skip
    for options in changed:
        with LLM(nano_dir, **{**CACHED, **options}, prefix_disk_cache=tmp_path) as llm:
            assert answer(llm, prompt)[1] == 0, options


def test_logits_after_an_answer_are_all_computed(nano_dir: Path) -> None:
    prompt = tokens(11, 200)
    with LLM(nano_dir, **CACHED) as llm:
        before = llm.logits(prompt)
        answer(llm, prompt)
        assert (llm.logits(prompt) == before).all()


def test_a_folder_in_use_and_too_little_memory_are_refused(nano_dir: Path, tmp_path: Path) -> None:
    with LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path), pytest.raises(UsageError, match="in use by another"):
        LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path)
    with pytest.raises(CapacityError, match="does not hold one state"):
        LLM(nano_dir, **{**CACHED, "prefix_host_cache_gb": 1e-6})
    with pytest.raises(CapacityError, match="prefix_disk_cache_gb 1e-06 does not hold one state"):
        LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path, prefix_disk_cache_gb=1e-6)
    LLM(nano_dir, **CACHED, prefix_disk_cache=tmp_path).close()
