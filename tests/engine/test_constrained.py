"""Constraints in the engine: masks that are kept to, whatever else is asked for and whoever else is in the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.dispatch.ops.sample import sample
from k3hal.engine.constrained_rows import unpacked
from k3hal.engine.interface import ConstraintError, EngineRequest
from k3hal.engine.sampler import Sampler
from k3hal.engine.sampling import GenerationDefaults, resolve_sampling
from k3hal.engine.step_plan import RowBinding
from k3hal.sampling_params import SamplingParams

from .fold_model import VOCAB
from .harness import EOS, Harness


class Modular:
    """After each token only those of one residue may come, which depends on all tokens so far; EOS ends `length`."""

    def __init__(self, length: int = 9, fails_at: int | None = None) -> None:
        self.length = length
        self.fails_at = fails_at

    def matcher(self) -> ModularMatcher:
        return ModularMatcher(self)

    def allowed(self, tokens: list[int]) -> list[int]:
        if len(tokens) >= self.length:
            return [EOS]
        residue = sum((place + 3) * token for place, token in enumerate(tokens)) % 4
        return [token for token in range(2, VOCAB) if token % 4 == residue]


class ModularMatcher:
    def __init__(self, constraint: Modular) -> None:
        self.constraint = constraint
        self.tokens: list[int] = []

    def fill(self, mask: np.ndarray) -> bool:
        assert mask.shape == (-(-VOCAB // 32),)
        assert mask.dtype == np.int32
        if len(self.tokens) == self.constraint.fails_at:
            raise ConstraintError("as planned")
        if EOS in self.tokens:
            return False
        bits = np.zeros(mask.size * 32, np.uint8)
        bits[self.constraint.allowed(self.tokens)] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)
        return True

    def accept(self, token_id: int) -> None:
        if EOS not in self.tokens and token_id not in self.constraint.allowed(self.tokens):
            raise ConstraintError(f"{token_id} is not allowed")
        self.tokens.append(token_id)


def check_allowed(constraint: Modular, tokens: list[int]) -> None:
    for place, token in enumerate(tokens):
        assert token in constraint.allowed(tokens[:place])


def run_alone(prompt: list[int], params: SamplingParams, constraint: Modular | None) -> list[int]:
    harness = Harness(max_num_batched_tokens=64, max_num_seqs=1)
    add(harness, "r", prompt, params, constraint)
    harness.run()
    return harness.tokens("r")


def add(harness: Harness, name: str, prompt: list[int], params: SamplingParams, constraint: Modular | None) -> None:
    harness.core.add(EngineRequest(name, prompt, params, constraint=constraint))
    harness.outputs[name] = []


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 1.0]),
            seed=st.integers(0, 9),
            max_tokens=st.just(25),
            min_tokens=st.sampled_from([0, 4, 15]),
            presence_penalty=st.sampled_from([0.0, 0.9]),
            logit_bias=st.sampled_from([None, {3: 50.0, 4: -100.0}]),
            logprobs=st.sampled_from([None, 2]),
        ),
        st.sampled_from([None, Modular(3), Modular(20)]),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=20, deadline=None)
@given(
    REQUESTS,
    st.integers(8, 12),
    st.sampled_from([6, 13, 64]),
    st.integers(1, 3),
    st.sampled_from([0, 3]),
    st.booleans(),
)
def test_neighbours_chunks_preemption_depth_and_drafts_change_nothing(
    requests: list[tuple[list[int], SamplingParams, Modular | None]],
    num_runs: int,
    budget: int,
    depth: int,
    drafts: int,
    graphs: bool,
) -> None:
    harness = Harness(
        num_runs=num_runs,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        async_depth=depth,
        drafts=drafts,
        graphs=graphs,
    )
    for number, request in enumerate(requests):
        add(harness, f"r{number}", *request)
    harness.run()
    for number, (prompt, params, constraint) in enumerate(requests):
        tokens = harness.tokens(f"r{number}")
        assert tokens == run_alone(prompt, params, constraint)
        if constraint is not None:
            check_allowed(constraint, tokens)
            assert len(tokens) == min(constraint.length + 1, 25)


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    harness = Harness(num_runs=8, max_num_seqs=2, max_num_batched_tokens=64)
    constraint = Modular(20)
    params = SamplingParams(temperature=0.0, max_tokens=30)
    for name in ("a", "b"):
        add(harness, name, [3] * 18, params, constraint)
    harness.run()
    assert harness.scheduler.preemptions > 0
    check_allowed(constraint, harness.tokens("b"))
    assert harness.tokens("b") == harness.tokens("a") == run_alone([3] * 18, params, constraint)


@pytest.mark.parametrize("fails_at", [0, 5])
@pytest.mark.parametrize(("depth", "drafts"), [(1, 0), (3, 0), (1, 2)])
def test_a_constraint_that_fails_ends_its_own_request(fails_at: int, depth: int, drafts: int) -> None:
    harness = Harness(async_depth=depth, drafts=drafts)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    add(harness, "bad", [2, 3], params, Modular(9, fails_at))
    add(harness, "good", [2, 3], params, Modular(9))
    harness.run()
    assert harness.reason("bad") == "error"
    assert harness.outputs["bad"][-1].error == "the constraint on the output failed: as planned"
    assert len(harness.tokens("bad")) == fails_at
    assert harness.reason("good") == "stop"


def test_early_ends_come_only_where_nothing_else_may() -> None:
    """`min_tokens` bans the end, unless the constraint has nothing left but that."""
    params = SamplingParams(temperature=0.0, max_tokens=30, min_tokens=12)
    assert len(run_alone([2], params, Modular(9))) == 10


def test_whoever_ignores_the_end_reads_on_without_a_constraint() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    tokens = run_alone([2], params, Modular(5))
    assert len(tokens) == 30
    check_allowed(Modular(5), tokens[:6])


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 100])
def test_masks_unpack_alike_on_a_device_and_on_the_host(vocab_size: int) -> None:
    words = np.random.default_rng(vocab_size).integers(-(2**31), 2**31, (3, 4), np.int64).astype(np.int32)
    bits = np.unpackbits(words.view(np.uint8), axis=-1, count=vocab_size, bitorder="little")
    assert unpacked(torch.from_numpy(words), vocab_size).tolist() == bits.astype(bool).tolist()


def sampler_row(sampler: Sampler, row: int, constraint: Modular | None, **params: Any) -> None:
    sampling = resolve_sampling(
        SamplingParams(**{"temperature": 0.0, **params}), GenerationDefaults(), eos_token_ids=(EOS,), room=99
    )
    sampler.bind(RowBinding(row, sampling, np.array([2], np.int64), 1, constraint))


def test_the_log_probabilities_are_those_of_the_untouched_logits() -> None:
    sampler = Sampler(VOCAB, 1, torch.device("cpu"), sample)
    sampler_row(sampler, 0, Modular(), logprobs=1)
    logits = torch.randn(1, VOCAB)
    tokens, logprobs = sampler.sample(logits.clone(), np.array([0]), np.array([0]))
    assert logprobs is not None
    assert logprobs[0] is not None
    assert logprobs[0].logprob == pytest.approx(logits.log_softmax(-1)[0, tokens[0]].item(), abs=1e-6)


def test_a_row_given_to_another_sequence_is_free_again() -> None:
    sampler = Sampler(VOCAB, 1, torch.device("cpu"), sample)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 9.0
    sampler_row(sampler, 0, Modular())
    assert sampler.sample(logits.clone(), np.array([0]), np.array([0]))[0][0] % 4 == 0
    sampler_row(sampler, 0, None)
    assert sampler.sample(logits.clone(), np.array([0]), np.array([0]))[0] == [7]


def test_a_token_that_nobody_may_choose_is_never_chosen() -> None:
    """Logits that are no numbers where the mask forbids them do no harm."""
    sampler = Sampler(VOCAB, 1, torch.device("cpu"), sample)
    sampler_row(sampler, 0, Modular(), temperature=1.0, seed=1)
    logits = torch.full((1, VOCAB), torch.nan)
    logits[0, ::4] = 1.0
    assert sampler.sample(logits, np.array([0]), np.array([0]))[0][0] % 4 == 0
