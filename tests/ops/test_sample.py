"""Sampling and draft verification: exactness, distributions, and independence of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3hal.backends import _prefix_sample
from k3hal.backends.cpu import sample as cpu_sample
from k3hal.dispatch.errors import InputError
from k3hal.dispatch.ops.sample import parameters, sample
from k3hal.dispatch.ops.verify_draft import METHODS, verify_draft

Fn = Callable[..., Any]
DRAWS = 100_000
BOTH = pytest.mark.parametrize("draw", [sample, cpu_sample.sample], ids=["reference", "cpu"])


def _even(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _frequencies(logits: torch.Tensor, **values: float) -> torch.Tensor:
    """How often the CPU provider draws each token from one row of logits."""
    tokens = cpu_sample.sample(logits.expand(DRAWS, -1), **parameters(DRAWS, **values), uniform=_even(DRAWS))
    return torch.bincount(tokens, minlength=logits.shape[0]).double()


def _chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """The statistic over tokens of nonzero probability; no other may have been drawn."""
    assert not counts[p == 0].any()
    expected = p[p > 0] * counts.sum()
    return float(((counts[p > 0] - expected).square() / expected).sum())


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, 12),
        ({"temperature": 0.5}, 12),
        ({"temperature": 2.0}, 12),
        ({"top_k": 4}, 4),
        ({"top_p": 0.6}, 4),
        ({"min_p": 0.4}, 5),
        ({"top_k": 6, "top_p": 0.7, "min_p": 0.2}, 4),
    ],
)
def test_distribution(values: dict[str, float], kept: int) -> None:
    """Logits in steps of 0.2, so that what each filter keeps can be counted by hand."""
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5))
    steps = -0.2 * torch.arange(12, dtype=torch.float64)
    p = torch.zeros(12, dtype=torch.float64)
    p[order[:kept]] = (steps / values.get("temperature", 1.0)).softmax(dim=0)[:kept]
    logits = torch.empty(12)
    logits[order] = steps.float()
    # The 99.99 % quantile of chi-square with 11 degrees of freedom is 37.4.
    assert _chi_square(_frequencies(logits, **values), p / p.sum()) < 37.4


@BOTH
def test_the_draw_is_the_inverse_of_the_cumulative_distribution(draw: Fn) -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25])).repeat(7, 1)
    uniform = torch.tensor([0.0, 0.499, 0.501, 0.749, 0.751, 0.899, 0.901], dtype=torch.float64)
    assert draw(logits, **parameters(7), uniform=uniform).tolist() == [1, 1, 3, 3, 2, 2, 0]


@BOTH
def test_greedy_takes_the_lowest_of_equals(draw: Fn) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf], [0.0, 0.0, 0.0, 0.0]])
    assert draw(logits, **parameters(2, temperature=0.0), uniform=_even(2)).tolist() == [1, 0]


@BOTH
def test_filters_of_one_token_are_greedy(draw: Fn) -> None:
    logits = torch.randn(30, 50, generator=torch.Generator().manual_seed(1))
    best = logits.argmax(dim=-1)
    for values in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-6}):
        assert torch.equal(draw(logits, **parameters(30, **values), uniform=_even(30)), best)


@BOTH
def test_masked_tokens_are_never_drawn(draw: Fn) -> None:
    logits = torch.full((40, 9), -torch.inf)
    logits[:, [2, 6]] = 0.0
    uniform = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64).repeat(20)
    assert draw(logits, **parameters(40), uniform=uniform).tolist() == [2, 6] * 20


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 9999),
    vocab=st.integers(1, 60),
    prefix=st.integers(1, 20),
    levels=st.sampled_from([2, 5, 1000]),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 0.3, 1.0, 4.0]),
            st.sampled_from([0, 1, 3, 10, 59, 100]),
            st.sampled_from([0.1, 0.6, 0.95, 1.0]),
            st.sampled_from([0.0, 0.05, 0.5]),
        ),
        min_size=1,
        max_size=20,
    ),
)
def test_any_prefix_gives_the_reference(
    seed: int, vocab: int, prefix: int, levels: int, rows: list[tuple[float, int, float, float]]
) -> None:
    """Ties, mixed parameters and short prefixes: the CPU provider draws the same tokens."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (len(rows), vocab), generator=g) * (8.0 / levels)
    names = ("temperature", "top_k", "top_p", "min_p")
    values = {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    arguments = {**parameters(len(rows), **values), "uniform": _even(len(rows), seed)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_prefix_sample, "PREFIX", min(prefix, vocab))
        patch.setattr(_prefix_sample, "FULL_SORT", 0)
        assert torch.equal(cpu_sample.sample(logits, **arguments), sample(logits, **arguments))


def test_a_row_is_drawn_alone() -> None:
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(24, 200, generator=g) * 3
    arguments = {**parameters(24, temperature=[0.0, 0.8, 1.2] * 8, top_p=0.9), "uniform": _even(24)}
    together = cpu_sample.sample(logits, **arguments)
    for r in range(24):
        alone = {name: column[r : r + 1] for name, column in arguments.items()}
        assert cpu_sample.sample(logits[r : r + 1], **alone) == together[r]


def _emitted(method: str, greedy: bool, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two emitted tokens [rows, 2] of a two-step chain over three tokens with two drafts, and how many were accepted.

    What verification leaves open is drawn from the target: the chain's second distribution depends on the first token.
    """
    g = torch.Generator().manual_seed(seed)
    first, draft_first = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.6, 0.1, 0.3])
    second = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
    draft_second = torch.tensor([[0.3, 0.3, 0.4], [0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    if greedy:
        a = draft_first.argmax().expand(rows)
        b = draft_second[a].argmax(dim=-1)
        probs = None
    else:
        a = torch.multinomial(draft_first, rows, replacement=True, generator=g)
        b = torch.multinomial(draft_second[a], 1, generator=g)[:, 0]
        probs = torch.stack([draft_first.expand(rows, 3), draft_second[a]], dim=1)
    bonus = torch.full((rows, 3), 1 / 3)
    target = torch.stack([first.expand(rows, 3), second[a], bonus], dim=1)
    uniform = torch.rand(rows, 3, dtype=torch.float64, generator=g)
    accepted, following = verify_draft(torch.stack([a, b], dim=1), probs, target, uniform, method)
    one = torch.where(accepted >= 1, a, following)
    fresh = torch.multinomial(second[one], 1, generator=g)[:, 0]
    two = torch.where(accepted == 2, b, torch.where(accepted == 1, following, fresh))
    return torch.stack([one, two], dim=1), accepted


@pytest.mark.parametrize("greedy", [False, True])
def test_verification_is_lossless(greedy: bool) -> None:
    """Total variation to the target's joint distribution; and blocks accept at least as much as tokens."""
    first = torch.tensor([0.2, 0.5, 0.3])
    second = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
    joint, rows, means = (first[:, None] * second).flatten().double(), 12_000, []
    for method in METHODS:
        emitted, accepted = _emitted(method, greedy, rows, 11)
        counts = torch.bincount(emitted[:, 0] * 3 + emitted[:, 1], minlength=9).double()
        # Nine cells: the expected total variation of exact draws is about 0.011, and 0.025 is five deviations above.
        assert float((counts / rows - joint).abs().sum() / 2) < 0.025, method
        means.append(float(accepted.double().mean()))
    assert means[1] >= means[0] - 0.02


@pytest.mark.parametrize("method", METHODS)
def test_temperature_zero_accepts_while_drafts_agree(method: str) -> None:
    target = torch.nn.functional.one_hot(torch.tensor([[2, 0, 1, 3]]).expand(4, 4), 5).float()
    drafts = torch.tensor([[2, 0, 1], [2, 0, 4], [0, 0, 1], [2, 1, 1]])
    accepted, following = verify_draft(drafts, None, target, _even(16).view(4, 4), method)
    assert accepted.tolist() == [3, 2, 0, 1]
    assert following.tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("method", METHODS)
def test_equal_distributions_accept_everything(method: str) -> None:
    g = torch.Generator().manual_seed(0)
    target = torch.randn(50, 4, 7, generator=g).softmax(dim=-1)
    drafts = torch.multinomial(target[:, :3].reshape(-1, 7), 1, generator=g).view(50, 3)
    uniform = torch.rand(50, 4, dtype=torch.float64, generator=g)
    accepted, _ = verify_draft(drafts, target[:, :3], target, uniform, method)
    assert accepted.tolist() == [3] * 50


@pytest.mark.parametrize("method", METHODS)
def test_a_negative_draft_ends_the_row(method: str) -> None:
    target = torch.full((2, 3, 4), 0.25)
    drafts = torch.tensor([[1, -1], [-1, -1]])
    accepted, following = verify_draft(drafts, target[:, :2], target, torch.full((2, 3), 0.6).double(), method)
    assert accepted.tolist() == [1, 0]
    assert following.tolist() == [2, 2]


def test_unknown_method_is_refused() -> None:
    with pytest.raises(InputError, match=r"'typical' is unknown.*standard, block"):
        verify_draft(torch.zeros(1, 1).long(), None, torch.ones(1, 2, 1), torch.zeros(1, 2).double(), "typical")
