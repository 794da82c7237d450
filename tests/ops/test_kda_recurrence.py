"""KDA's recurrence in chunks and token by token, against its definition in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from k3hal.dispatch.sampling_inputs import int32, offsets

from .kda_layer import DIM, HEADS, KINDS, bound, recurrence_fp64, relative_error

DECAYS = {
    "usual": lambda u: -5 * u,
    "near_zero": lambda u: -1e-5 * u,
    "at_bound": lambda u: -5 + 1e-3 * u,
    "minus_fifty": lambda u: -50 - u,
    "strong_then_weak": lambda u: torch.where(u < 0.1, torch.tensor(-1000.0), -0.01 * u),
}


def _inputs(count: int, decay: str = "usual", seed: int = 0, heads: int = HEADS) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(count, heads, DIM, generator=gen) for _ in range(3))
    g = DECAYS[decay](torch.rand(count, heads, DIM, generator=gen))
    return {"q": q, "k": k, "v": v, "g": g, "beta": torch.rand(count, heads, generator=gen)}


def _one_sequence(kind: str, inputs: dict[str, Tensor], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    heads = inputs["q"].shape[1]
    cache = torch.full((2, heads, DIM, DIM), torch.nan)
    if state is not None:
        cache[1] = state
    out = bound("kda_chunk", kind)(
        **inputs, state=cache, slots=int32([1]), cu_seqlens=offsets([len(inputs["q"])]),
        has_state=torch.tensor([state is not None]),
    )  # fmt: skip
    return out, cache[1]


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 65, 130])
def test_chunks_equal_the_definition(kind: str, count: int, decay: str) -> None:
    inputs = _inputs(count, decay)
    start = torch.randn(HEADS, DIM, DIM, generator=torch.Generator().manual_seed(1))
    out, state = _one_sequence(kind, inputs, start)
    golden_out, golden_state = recurrence_fp64(**inputs, state=start)
    assert relative_error(out, golden_out) < 3e-6
    assert relative_error(state, golden_state) < 3e-6


def test_every_prompt_length() -> None:
    whole = _inputs(130)
    golden, _ = recurrence_fp64(**whole)
    for count in range(1, 131):
        out, _ = _one_sequence("cpu", {name: x[:count] for name, x in whole.items()})
        assert relative_error(out, golden[:count]) < 3e-6, count


def test_more_tokens_than_one_tile() -> None:
    lengths, heads = (1060, 3, 0, 70), 2
    inputs = _inputs(sum(lengths), heads=heads)
    cache = torch.full((5, heads, DIM, DIM), torch.nan)
    out = bound("kda_chunk", "cpu")(
        **inputs,
        state=cache,
        slots=int32([4, 1, 3, 2]),
        cu_seqlens=offsets(lengths),
        has_state=torch.tensor([False] * 4),
    )
    start = 0
    for slot, length in zip((4, 1, 3, 2), lengths, strict=True):
        if length:
            golden, state = recurrence_fp64(**{name: x[start : start + length] for name, x in inputs.items()})
            assert relative_error(out[start : start + length], golden) < 3e-6
            assert relative_error(cache[slot], state) < 3e-6
        start += length
    assert cache[3].isnan().all()


def test_nearly_equal_keys_do_not_amplify_errors() -> None:
    inputs = _inputs(128, "near_zero")
    inputs["k"] = inputs["k"][:1] + 1e-3 * inputs["k"]
    inputs["beta"] = torch.full_like(inputs["beta"], 0.999)
    out, state = _one_sequence("cpu", inputs)
    golden_out, golden_state = recurrence_fp64(**inputs)
    assert relative_error(out, golden_out) < 2e-5
    assert relative_error(state, golden_state) < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_keys_are_normalised_with_eps_on_the_sum(kind: str) -> None:
    inputs = _inputs(5)
    inputs["k"] = inputs["k"] * 1e-4
    inputs["q"] = torch.zeros_like(inputs["q"])
    out, state = _one_sequence(kind, inputs)
    assert torch.equal(out, torch.zeros_like(out))
    assert relative_error(state, recurrence_fp64(**inputs)[1]) < 3e-6


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_token_steps_equal_the_definition(kind: str, decay: str) -> None:
    inputs = _inputs(3, decay)
    cache = torch.randn(5, HEADS, DIM, DIM, generator=torch.Generator().manual_seed(2))
    before, slots = cache.clone(), (4, 1, 2)
    out = bound("kda_recurrent", kind)(**inputs, state=cache, slots=int32(slots))
    for n, slot in enumerate(slots):
        row = {name: x[n : n + 1] for name, x in inputs.items()}
        golden, state = recurrence_fp64(**row, state=before[slot])
        assert relative_error(out[n : n + 1], golden) < 3e-6
        assert relative_error(cache[slot], state) < 3e-6
    assert torch.equal(cache[[0, 3]], before[[0, 3]])
